"""The receiving side against a writer that a test plays line by line."""

from collections.abc import Sequence

import pytest

from tandem_engine.config import SchedulePolicy
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.fake import FakeFabric, Fate
from tandem_engine.executor.fake import next_token
from tandem_engine.messages.outputs import CacheHits, FinishReason, TokenLogprob
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import DrainAck, Hello, TransferAborted, WriteGrant
from tandem_engine.names import PageId, RequestId
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import CONFIG, DRAIN_TIMEOUT, GRANT_TIMEOUT, PROMPT, Side, handoff, make_side
from tandem_testing.disagg_script import ScriptedPeer, make_scripted_peer
from tandem_testing.scheduler_builders import VOCAB, expected_output, make_message

ROOM = "room-r"
WRITER = make_peer("p")


class Receiver:
    """A decode engine, and the prefill engine that the test plays."""

    def __init__(self, **engine: object) -> None:
        self.fabric, self.network = FakeFabric(), PeerNetwork()
        self.side: Side = make_side(make_peer("d"), fabric=self.fabric, network=self.network, **engine)
        self.writer: ScriptedPeer = make_scripted_peer(
            WRITER, self.side.peer, fabric=self.fabric, network=self.network, clock=self.side.engine.clock
        )

    def submit(self, rid: str = "r", prompt: Sequence[int] = PROMPT, *, generation: int = 1, **request: object) -> None:
        end = handoff(HandoffSide.RECEIVE, WRITER, f"room-{rid}", generation)
        self.side.engine.add(make_message(rid, prompt, handoff=end, **request))
        self.turn()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.fabric.advance()
            self.side.step()

    def pass_time(self, seconds: float) -> None:
        self.side.engine.clock.time += seconds
        self.turn()

    def granted(self, rid: str = "r", prompt: Sequence[int] = PROMPT, **request: object) -> WriteGrant:
        """Submit, and be the writer that has computed the prompt."""
        self.submit(rid, prompt, **request)
        self.writer.learn_pools()
        self.writer.fill(tuple(prompt))
        return self.writer.grant()

    def transferred(self, **request: object) -> WriteGrant:
        """A whole transfer but for the last look at the digests."""
        grant = self.granted(**request)
        self.writer.write(grant)
        self.writer.record(grant, first_token(PROMPT))
        return grant

    def is_cached(self, prompt: Sequence[int] = PROMPT) -> bool:
        return self.side.engine.memory.cached_len(tuple(prompt), salt="", max_match=len(prompt)) > 0

    def held(self) -> list[int]:
        return [*self.side.stage.held_pages()]

    def aborts(self) -> list[TransferAborted]:
        return self.side.link.messages(TransferAborted)

    def assert_failed(self, why: str, rid: str = "r") -> None:
        """The gateway was told once, that another attempt can help."""
        finish = self.side.finish(rid)
        assert finish is not None
        assert (finish.reason, finish.code, finish.retryable) == (FinishReason.ERROR, "transfer_error", True)
        assert why in finish.error
        assert self.side.tokens(rid) == []

    def drain(self, rid: str = "r", *, generation: int = 1) -> None:
        self.writer.ack(f"room-{rid}", generation=generation)
        self.turn()


def first_token(prompt: Sequence[int]) -> int:
    return next_token(prompt, vocab_size=VOCAB)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


# Granting


def test_a_request_that_is_not_to_be_received_is_not_kept(receiver):
    receiver.side.engine.add(make_message("alone"))
    receiver.turn(20)
    receiver.side.engine.assert_expected("alone")


def test_the_pool_is_announced_once_and_each_request_gets_a_grant(receiver):
    receiver.submit("r")
    receiver.submit("s", range(20, 30))
    assert len(receiver.writer.got(Hello)) == 1
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == ["room-r", "room-s"]
    assert not {*receiver.writer.got(WriteGrant)[0].pages} & {*receiver.writer.got(WriteGrant)[1].pages}


def test_a_grant_names_the_writer_and_pages_for_the_whole_prompt(receiver):
    grant = receiver.granted()
    assert (grant.writer, grant.first_token, len(grant.pages)) == (WRITER.incarnation, 0, 3)
    assert grant.valid_s == GRANT_TIMEOUT - CONFIG.renewal_period


def test_a_cached_prefix_is_not_asked_for(receiver):
    receiver.side.engine.add(make_message("before", PROMPT[:9]))
    receiver.turn(20)
    grant = receiver.granted()
    assert (grant.first_token, len(grant.pages)) == (8, 1)


def test_a_wholly_cached_prompt_still_asks_for_its_last_page(receiver):
    receiver.side.engine.add(make_message("before", PROMPT[:8]))
    receiver.turn(20)
    grant = receiver.granted(prompt=PROMPT[:8])
    assert (grant.first_token, len(grant.pages)) == (4, 1)


def test_resumed_output_is_part_of_what_the_writer_computes(receiver):
    grant = receiver.granted(resume=(50, 51, 52), max_tokens=8)
    assert len(grant.pages) == 4


def test_a_writer_with_kv_of_another_shape_is_refused(receiver):
    alien = make_peer("p", compat_hash="shape-2")
    receiver.side.engine.add(make_message("r", handoff=handoff(HandoffSide.RECEIVE, alien, ROOM)))
    receiver.turn()
    receiver.assert_failed("another shape")
    receiver.side.assert_clean()


def test_a_writer_that_cannot_be_reached_fails_the_request_at_once(receiver):
    receiver.side.link.unreachable.add(WRITER.incarnation)
    receiver.submit()
    receiver.assert_failed("cannot be reached")


def test_a_room_that_is_in_use_is_refused_and_its_first_transfer_goes_on(receiver):
    receiver.transferred()
    end = handoff(HandoffSide.RECEIVE, WRITER, ROOM)
    receiver.side.engine.add(make_message("other", handoff=end))
    receiver.turn(30)
    receiver.assert_failed("in use", "other")
    receiver.side.engine.assert_expected("r")


def test_another_generation_of_a_room_is_another_transfer(receiver):
    receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    end = handoff(HandoffSide.RECEIVE, WRITER, ROOM, generation=2)
    receiver.side.engine.add(make_message("again", PROMPT, handoff=end))
    receiver.turn()
    assert receiver.writer.grant().generation == 2


# Waiting for memory


def test_a_prompt_waits_until_its_pages_are_free():
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    assert receiver.writer.grant().room == ROOM
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.drain()
    assert receiver.writer.grant().room == "room-s"


def test_a_short_prompt_does_not_overtake_a_long_one_that_waits():
    receiver = Receiver(usable_pages=6)
    receiver.granted()
    receiver.submit("long", range(20, 40), max_tokens=2)
    receiver.submit("short", range(40, 43), max_tokens=2)
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == [ROOM]


@pytest.mark.parametrize(("policy", "first"), [(SchedulePolicy.FCFS, "plain"), (SchedulePolicy.PRIORITY, "urgent")])
def test_the_policy_says_who_gets_pages_first(policy: SchedulePolicy, first: str):
    receiver = Receiver(usable_pages=8, schedule_policy=policy)
    receiver.submit("holder", range(24), max_tokens=1)
    receiver.submit("plain", range(30, 50), max_tokens=1)
    receiver.submit("urgent", range(50, 70), max_tokens=1, priority=5)
    receiver.side.engine.scheduler.abort(RequestId("holder"))
    receiver.turn()
    receiver.drain("holder")
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == ["room-holder", f"room-{first}"]


def test_pages_that_running_requests_are_expected_to_need_are_not_granted():
    receiver = Receiver(usable_pages=12, init_new_token_ratio=1.0)
    receiver.side.engine.add(make_message("running", range(50, 54), max_tokens=30))
    receiver.turn()
    receiver.submit("r", range(1, 20))
    assert receiver.writer.got(WriteGrant) == []
    receiver.turn(40)
    assert len(receiver.writer.got(WriteGrant)) == 1


def test_waiting_for_memory_ends_with_a_silent_writer_and_it_is_told():  # T63
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.side.engine.clock.time = 4.0
    receiver.submit("s", range(20, 30))
    receiver.pass_time(GRANT_TIMEOUT - 4.0)
    assert receiver.side.finish("s") is None
    receiver.pass_time(4.0)
    receiver.assert_failed("fell silent before there was memory", "s")
    assert "room-s" in {abort.room for abort in receiver.aborts()}


def test_no_row_is_granted_that_is_not_free():
    receiver = Receiver(max_rows=1)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    assert len(receiver.writer.got(WriteGrant)) == 1


def test_no_more_transfers_are_let_in_than_can_run():
    receiver = Receiver(max_running_requests=2)
    for start in (20, 40, 60):
        receiver.submit(f"r{start}", range(start, start + 6))
    assert len(receiver.writer.got(WriteGrant)) == 2
    receiver.side.engine.scheduler.abort(RequestId("r20"))
    receiver.turn()
    assert receiver.writer.grant().room == "room-r60"


# Receiving


def test_a_verified_transfer_continues_from_the_first_token(receiver):  # T67
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn()
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")
    receiver.side.assert_clean()
    assert receiver.side.stage.counters.committed == 1


def test_the_first_token_is_streamed_again_with_the_transfer_report(receiver):
    receiver.transferred()
    receiver.turn(4)
    output = receiver.side.engine.received["r"].outputs[0]
    assert (output.index, output.token_ids[0]) == (0, first_token(PROMPT))
    assert (output.transfer.pages, output.transfer.pages_reused) == (3, 0)
    assert output.transfer.bytes == 3 * receiver.side.engine.model.pool.page_bytes


def test_logprobs_of_the_first_token_come_with_the_record(receiver):
    grant = receiver.granted(logprobs=0)
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(PROMPT), logprobs=(TokenLogprob(logprob=-0.25),))
    receiver.turn(20)
    assert receiver.side.engine.received["r"].logprobs[0] == TokenLogprob(logprob=-0.25)
    assert len(receiver.side.engine.received["r"].logprobs) == 8


def test_pages_may_be_written_in_any_order_and_more_than_once(receiver):  # T71
    grant = receiver.granted()
    receiver.fabric.fates = lambda push: Fate(delay=2 - push.key.first)
    for first in (0, 1, 2, 1, 2):
        receiver.writer.write(grant, first, 1)
    receiver.turn(3)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


def test_nothing_is_verified_before_the_record_says_that_it_is_written(receiver):  # T62, T67
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn(5)
    assert receiver.side.tokens() == []
    assert not receiver.is_cached()


def test_a_record_of_pages_that_are_not_there_admits_nothing(receiver):  # T62
    grant = receiver.granted()
    receiver.writer.write(grant, 0, 2)
    receiver.turn(2)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(5)
    receiver.assert_failed("1 of 3 pages did not verify")
    assert not receiver.is_cached()


def test_a_record_that_comes_again_changes_nothing(receiver):  # T71
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn(2)
    for _ in range(3):
        receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")
    assert receiver.side.stage.counters.ignored == 2


def test_a_received_prompt_is_cached_for_others(receiver):
    receiver.transferred()
    receiver.turn(3)
    assert receiver.is_cached()


@pytest.mark.parametrize("hits", [CacheHits(host=4, disk=2), None], ids=["told", "by an older release"])
def test_the_client_learns_where_the_writer_found_its_prefix(receiver, hits):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(PROMPT), cached_tokens=8, cache_hits=hits)
    receiver.turn(20)
    first = receiver.side.engine.received["r"].outputs[0]
    assert (first.cached_tokens, first.cache_hits) == (8, hits)


def test_a_resumed_request_continues_where_the_client_is(receiver):
    resumed = expected_output(make_message("r", PROMPT, max_tokens=3))
    history = (*PROMPT, *resumed)
    grant = receiver.granted(resume=resumed, max_tokens=8)
    receiver.writer.fill(history)
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(history))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


def test_a_first_token_that_ends_the_output_finishes_the_request(receiver):
    receiver.transferred(max_tokens=1)
    receiver.turn(3)
    receiver.side.engine.assert_expected("r")
    assert receiver.side.finish().reason is FinishReason.LENGTH
    receiver.side.assert_clean()


# What does not verify


def test_a_corrupt_page_never_reaches_attention_or_the_cache(receiver):  # T62
    receiver.fabric.fates = lambda _push: Fate(corrupt=True)
    receiver.transferred()
    receiver.turn(3)
    receiver.assert_failed("1 of 3 pages did not verify")
    assert receiver.side.stage.counters.digest_mismatches == 1
    receiver.drain()
    assert not receiver.is_cached()
    receiver.side.assert_clean()


@pytest.mark.parametrize("place", [{"room": "room-s"}, {"generation": 2}, {"first": 1}])
def test_intact_pages_that_were_meant_for_another_place_do_not_verify(receiver, place):  # T66
    grant = receiver.granted()
    receiver.writer.write(grant)
    there = {"room": ROOM, "generation": 1, "first": 0, **place}
    pages = tuple(PageId(page) for page in (1, 2, 3))
    receiver.writer.record(grant, 1, digests=PageDigester(receiver.writer.pool).digest(pages, **there))
    receiver.turn(3)
    receiver.assert_failed("3 of 3 pages did not verify")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pages": 2}, "says it wrote 2 pages"),
        ({"first_token": 4}, "from token 4"),
        ({"digests": (1, 2)}, "2 digests for 3 pages"),
        ({"output_ids": ()}, "0 tokens handed over"),
        ({"output_ids": (1, 2)}, "2 tokens handed over"),
    ],
)
def test_a_record_that_contradicts_the_grant_fails_the_transfer(receiver, changed, why):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **changed)
    receiver.turn(2)
    receiver.assert_failed(why)


def test_the_first_record_of_a_transfer_counts(receiver):
    grant = receiver.granted()
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.writer.record(grant, 1, digests=(1, 2, 3))
    receiver.writer.write(grant)
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


@pytest.mark.parametrize("changed", [{"sender": make_peer("q")}, {"generation": 2}, {"room": "room-x"}])
def test_a_record_for_another_transfer_is_ignored(receiver, changed):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **changed)
    receiver.turn(3)
    assert receiver.side.finish() is None
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


# Every way to end early


def test_an_abort_keeps_the_pages_until_the_writer_acks(receiver):  # T60
    grant = receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn()
    assert receiver.side.finish().reason is FinishReason.ABORT
    assert receiver.held() == [*grant.pages]
    assert [abort.side for abort in receiver.aborts()] == [HandoffSide.RECEIVE]
    receiver.submit("s", range(20, 30))
    assert not {*receiver.writer.grant().pages} & {*grant.pages}
    receiver.drain()
    assert receiver.held() == []


def test_a_late_write_after_an_abort_changes_nothing_for_anybody(receiver):  # T60, T65
    grant = receiver.granted()
    receiver.fabric.fates = lambda _push: Fate(delay=4)
    receiver.writer.write(grant)
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.side.engine.add(make_message("other", range(30, 50)))
    receiver.turn(40)
    receiver.side.engine.assert_expected("other")
    receiver.drain()
    receiver.side.assert_clean()


def test_an_abort_while_waiting_holds_nothing():
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    receiver.side.engine.scheduler.abort(RequestId("s"))
    receiver.turn()
    assert receiver.side.finish("s").reason is FinishReason.ABORT
    assert [abort.room for abort in receiver.aborts()] == ["room-s"]


def test_an_abort_during_verification_is_obeyed(receiver):
    receiver.transferred()
    receiver.fabric.advance()
    receiver.side.stage.poll()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn(3)
    assert receiver.side.finish().reason is FinishReason.ABORT
    assert not receiver.is_cached()
    receiver.drain()
    receiver.side.assert_clean()


def test_an_abort_after_the_transfer_tells_the_writer_nothing(receiver):
    receiver.transferred()
    receiver.turn(4)
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn(3)
    assert receiver.aborts() == []
    receiver.side.assert_clean()


def test_an_aborted_request_that_was_refused_at_admission_tells_the_writer(receiver):  # T63
    receiver.side.engine.scheduler.drain()
    receiver.submit()
    assert [abort.room for abort in receiver.aborts()] == [ROOM]


def test_a_transfer_whose_writer_falls_silent_fails_and_drains(receiver):  # T62
    grant = receiver.granted()
    receiver.writer.write(grant, 0, 1)
    receiver.turn()
    receiver.pass_time(GRANT_TIMEOUT)
    receiver.assert_failed("fell silent")
    assert receiver.held() == [*grant.pages]
    receiver.drain()
    receiver.side.assert_clean()


def test_without_an_ack_pages_are_quarantined_until_the_writers_process_has_ended(receiver):  # T60, T61
    grant = receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.pass_time(DRAIN_TIMEOUT)
    assert receiver.side.stage.quarantined_pages() == 3
    receiver.pass_time(100 * DRAIN_TIMEOUT)
    assert receiver.held() == [*grant.pages]
    receiver.side.stage.peer_gone(WRITER.incarnation)
    receiver.pass_time(10 * DRAIN_TIMEOUT)
    assert receiver.held() == [*grant.pages], "it may be stopped in the middle of a write"
    assert receiver.side.stage.fenced_writers() == (WRITER,)
    receiver.side.stage.peer_ended(WRITER.incarnation)
    receiver.turn()
    assert receiver.held() == []
    assert receiver.side.stage.fenced_writers() == ()
    receiver.side.assert_clean()


def test_a_silent_writer_is_asked_again_and_its_late_ack_ends_the_quarantine(receiver):  # T61
    receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn()
    receiver.pass_time(DRAIN_TIMEOUT)
    receiver.pass_time(DRAIN_TIMEOUT)
    assert len(receiver.aborts()) == 3
    assert receiver.side.stage.counters.quarantined == 1
    receiver.drain()
    receiver.side.assert_clean()


def test_a_newer_incarnation_of_the_writer_fences_it(receiver):  # T74
    """Two processes may have one name: the older one may be in the middle of a write."""
    receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.pass_time(DRAIN_TIMEOUT)
    receiver.side.link.supersede(WRITER.incarnation)
    receiver.turn()
    assert receiver.held()
    assert receiver.side.stage.fenced_writers() == (WRITER,)
    receiver.side.stage.peer_ended(WRITER.incarnation)
    receiver.side.assert_clean()
    assert WRITER.incarnation in receiver.side.link.fenced


def test_the_writer_giving_up_fails_the_request(receiver):  # T63
    receiver.granted()
    receiver.writer.abort(HandoffSide.SEND, ROOM)
    receiver.turn()
    receiver.assert_failed("gave up: scripted")
    receiver.drain()
    receiver.side.assert_clean()


def test_the_writer_giving_up_reaches_a_request_that_still_waits():  # T64
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    receiver.writer.abort(HandoffSide.SEND, "room-s")
    receiver.turn()
    receiver.assert_failed("gave up", "s")


@pytest.mark.parametrize("granted", [True, False])
def test_an_output_that_ended_with_its_first_token_ends_silently(granted):
    receiver = Receiver(usable_pages=5)
    if granted:
        receiver.granted()
    else:
        receiver.granted("other", range(20, 30))
        receiver.submit()
    receiver.writer.abort(HandoffSide.SEND, ROOM, finished=True)
    receiver.turn()
    assert receiver.side.finish() is None
    assert receiver.side.tokens() == []
    assert receiver.side.stage.counters.failed == 0
    assert "r" not in {req.rid for req in receiver.side.stage.live()}


def test_an_abort_by_anybody_but_the_writer_is_ignored(receiver):
    receiver.granted()
    stranger = make_scripted_peer(
        make_peer("q"),
        receiver.side.peer,
        fabric=receiver.fabric,
        network=receiver.network,
        clock=receiver.side.engine.clock,
    )
    stranger.abort(HandoffSide.SEND, ROOM)
    receiver.writer.abort(HandoffSide.SEND, ROOM, generation=2)
    receiver.turn()
    assert receiver.side.finish() is None
    assert receiver.side.stage.counters.ignored == 2


def test_a_dead_writer_fails_its_requests_and_frees_their_pages_at_once(receiver):  # T74
    receiver.granted()
    receiver.granted("s", range(20, 30))
    receiver.side.stage.peer_ended(WRITER.incarnation)
    receiver.turn()
    receiver.assert_failed("is gone", "r")
    receiver.assert_failed("is gone", "s")
    receiver.side.assert_clean()


def test_a_fenced_writer_that_wakes_up_and_acknowledges_frees_its_pages(receiver):  # T60
    receiver.granted()
    receiver.side.stage.peer_gone(WRITER.incarnation)
    receiver.turn()
    receiver.assert_failed("is gone", "r")
    assert receiver.held()
    receiver.drain()
    receiver.side.assert_clean()


def test_after_a_lost_transfer_the_pool_is_announced_again(receiver):
    receiver.granted()
    receiver.writer.abort(HandoffSide.SEND, ROOM)
    receiver.turn()
    receiver.submit("s", range(20, 30))
    assert len(receiver.writer.got(Hello)) == 2


def test_late_signals_of_a_finished_transfer_are_ignored(receiver):  # T65
    grant = receiver.transferred()
    receiver.turn(4)
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1)
    receiver.writer.send(DrainAck(room=ROOM, generation=1, sender=WRITER))
    receiver.writer.abort(HandoffSide.SEND, ROOM)
    receiver.side.step()
    assert receiver.side.finish() is None
    assert receiver.side.stage.counters.ignored == 3


def test_writes_of_peers_are_attended_to_only_while_transfers_are_open(receiver):
    grant = receiver.granted()
    assert receiver.side.transport.expected == 1
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(4)
    assert receiver.side.transport.expected == 0


@pytest.mark.parametrize("stage", ["waiting", "receiving"])
def test_a_deadline_of_a_request_without_its_kv_is_named(stage):  # T63
    receiver = Receiver(usable_pages=5)
    receiver.granted("first")
    receiver.submit(deadline_s=2.0)
    if stage == "receiving":
        receiver.side.engine.scheduler.abort(RequestId("first"))
        receiver.turn()
        receiver.drain("first")
    assert len(receiver.side.link.messages(WriteGrant)) == (2 if stage == "receiving" else 1)
    receiver.pass_time(2.0)
    finish = receiver.side.finish()
    assert (finish.reason, finish.code) == (FinishReason.ABORT, "deadline_exceeded")


@pytest.mark.parametrize(
    ("request_fields", "record_fields", "why"),
    [
        ({}, {"output_ids": (VOCAB,)}, f"token id {VOCAB}"),
        ({}, {"output_ids": (-1,)}, "token id -1"),
        ({}, {"output_ids": (2**63,)}, "token id"),
        ({"logprobs": 1}, {}, "0 logprobs"),
        ({"logprobs": 1}, {"logprobs": (TokenLogprob(logprob=-1.0),) * 2}, "2 logprobs"),
        ({}, {"logprobs": (TokenLogprob(logprob=-1.0),)}, "1 logprobs"),
    ],
)
def test_a_record_whose_output_makes_no_sense_fails_the_transfer(receiver, request_fields, record_fields, why):  # E10
    grant = receiver.granted(**request_fields)
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **record_fields)
    receiver.turn(4)
    receiver.assert_failed(why)
    receiver.drain()
    receiver.side.assert_clean()


def test_a_worker_does_not_hand_over_to_itself(receiver):
    end = handoff(HandoffSide.RECEIVE, receiver.side.peer, ROOM)
    receiver.side.engine.add(make_message("r", PROMPT, handoff=end))
    receiver.turn()
    receiver.assert_failed("itself")
    receiver.side.assert_clean()


def test_a_second_request_in_a_room_does_not_end_the_first():
    receiver = Receiver(usable_pages=5)
    receiver.granted("first")
    receiver.submit()
    end = handoff(HandoffSide.RECEIVE, WRITER, ROOM)
    receiver.side.engine.add(make_message("again", PROMPT, handoff=end))
    receiver.turn()
    receiver.assert_failed("in use", "again")
    assert receiver.aborts() == []
    assert receiver.side.finish() is None


def test_requests_that_wait_for_pages_count_against_the_queue_cap():
    receiver = Receiver(usable_pages=5, max_queued_requests=2)
    receiver.granted("first")
    for rid in ("second", "third", "fourth"):
        receiver.submit(rid)
    assert receiver.side.finish("fourth").code == "queue_full"
    assert receiver.side.finish("third") is None


def test_transfers_under_way_have_their_seat_in_the_running_batch():
    receiver = Receiver(max_running_requests=2)
    grants = [receiver.granted(rid) for rid in ("r", "s")]
    for number in range(2):
        receiver.side.engine.add(make_message(f"local-{number}", range(40, 45), max_tokens=30))
    for grant in grants:
        receiver.writer.write(grant)
        receiver.writer.record(grant, first_token(PROMPT))
    for _ in range(80):
        receiver.turn()
        assert len(receiver.side.engine.scheduler.queues.running) <= 2
    receiver.side.engine.assert_expected()


def test_a_local_request_does_not_wait_for_one_that_has_no_pages_to_give_back():
    receiver = Receiver(usable_pages=8, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    receiver.granted("lost")
    receiver.side.engine.scheduler.abort(RequestId("lost"))
    receiver.turn()
    assert len(receiver.held()) == 3
    receiver.side.engine.add(make_message("local", range(1, 9), max_tokens=20))
    receiver.submit("waiting", range(20, 44))
    receiver.turn(3)
    assert receiver.side.tokens("local") != []
