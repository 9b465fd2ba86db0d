"""The receiving side against a writer that a test plays line by line: grants, memory, what comes through."""

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.base.release import RELEASE, WINDOW
from tandem_engine.config import SchedulePolicy
from tandem_engine.disaggregation.base import StageHost
from tandem_engine.messages.outputs import CacheHits, FinishReason, TokenLogprob
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import Hello, WriteGrant
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import CONFIG, GRANT_TIMEOUT, PROMPT, handoff
from tandem_testing.disagg_played import ROOM, WRITER, Receiver, first_token
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import expected_output, make_message


class Asked:
    """A host that notes when it is asked to unpin a session."""

    def __init__(self, host: StageHost, asked: list[str]) -> None:
        self._host, self._asked = host, asked

    def unpin_idle_session(self) -> bool:
        self._asked.append("unpin")
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._host, name)


# Granting


def test_request_without_a_handoff_is_computed_and_not_kept_by_the_decode_stage(receiver):
    receiver.side.engine.add(make_message("alone"))
    receiver.turn(20)
    receiver.side.engine.assert_expected("alone")


def test_pool_is_announced_once_and_each_request_gets_a_grant(receiver):
    receiver.submit("r")
    receiver.submit("s", range(20, 30))
    assert len(receiver.writer.got(Hello)) == 1
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == ["room-r", "room-s"]
    assert not {*receiver.writer.got(WriteGrant)[0].pages} & {*receiver.writer.got(WriteGrant)[1].pages}


def test_grant_names_the_writer_and_pages_for_the_whole_prompt(receiver):
    grant = receiver.granted()
    assert (grant.writer, grant.first_token, len(grant.pages)) == (WRITER.incarnation, 0, 3)
    assert grant.valid_s == GRANT_TIMEOUT - CONFIG.renewal_period


def test_cached_prefix_is_not_requested(receiver):
    receiver.side.engine.add(make_message("before", PROMPT[:9]))
    receiver.turn(20)
    grant = receiver.granted()
    assert (grant.first_token, len(grant.pages)) == (8, 1)


def test_fully_cached_prompt_requests_its_last_page(receiver):
    receiver.side.engine.add(make_message("before", PROMPT[:8]))
    receiver.turn(20)
    grant = receiver.granted(prompt=PROMPT[:8])
    assert (grant.first_token, len(grant.pages)) == (4, 1)


def test_resumed_output_is_computed_by_the_writer(receiver):
    grant = receiver.granted(resume=(50, 51, 52), max_tokens=8)
    assert len(grant.pages) == 4


def test_writer_with_kv_of_another_shape_is_refused(receiver):
    alien = make_peer("p", compat_hash="shape-2")
    receiver.side.engine.add(make_message("r", handoff=handoff(HandoffSide.RECEIVE, alien, ROOM)))
    receiver.turn()
    receiver.assert_failed("another shape")
    receiver.side.assert_clean()


def test_writer_outside_the_window_is_refused_by_name(receiver):
    later = make_peer("p", release=RELEASE + WINDOW + 1)
    receiver.side.engine.add(make_message("r", handoff=handoff(HandoffSide.RECEIVE, later, ROOM)))
    receiver.turn()
    receiver.assert_failed(f"of release {RELEASE + WINDOW + 1}, outside the window of release {RELEASE}")
    receiver.side.assert_clean()


def test_writer_that_cannot_be_reached_fails_the_request_at_once(receiver):
    receiver.side.link.unreachable.add(WRITER.incarnation)
    receiver.submit()
    receiver.assert_failed("cannot be reached")


def test_room_in_use_is_rejected_and_first_transfer_continues(receiver):
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


def test_prompt_waits_until_its_pages_are_free():
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    assert receiver.writer.grant().room == ROOM
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.drain()
    assert receiver.writer.grant().room == "room-s"


def test_no_pin_is_dropped_while_a_copy_touches_states(receiver):  # [page-fence]
    """Sessions have nothing that helps: the copy ends, whatever is unpinned."""
    asked = []
    prealloc = receiver.side.stage.decode.prealloc
    memory = prealloc.host.memory
    prealloc.host = Asked(prealloc.host, asked)
    memory.copies.newest_of_row = memory.copies.acked + 1
    receiver.submit()
    assert (receiver.writer.got(WriteGrant), asked) == ([], [])
    memory.copies.newest_of_row = memory.copies.acked
    receiver.turn()
    assert receiver.writer.grant().room == ROOM


def test_short_prompt_does_not_overtake_a_long_one_that_waits():
    receiver = Receiver(usable_pages=6)
    receiver.granted()
    receiver.submit("long", range(20, 40), max_tokens=2)
    receiver.submit("short", range(40, 43), max_tokens=2)
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == [ROOM]


@pytest.mark.parametrize(("policy", "first"), [(SchedulePolicy.FCFS, "plain"), (SchedulePolicy.PRIORITY, "urgent")])
def test_schedule_policy_orders_page_grants(policy: SchedulePolicy, first: str):
    receiver = Receiver(usable_pages=8, schedule_policy=policy)
    receiver.submit("holder", range(24), max_tokens=1)
    receiver.submit("plain", range(30, 50), max_tokens=1)
    receiver.submit("urgent", range(50, 70), max_tokens=1, priority=5)
    receiver.side.engine.scheduler.abort(RequestId("holder"))
    receiver.turn()
    receiver.drain("holder")
    assert [grant.room for grant in receiver.writer.got(WriteGrant)] == ["room-holder", f"room-{first}"]


def test_grants_exclude_pages_expected_by_running_requests():
    receiver = Receiver(usable_pages=12, init_new_token_ratio=1.0)
    receiver.side.engine.add(make_message("running", range(50, 54), max_tokens=30))
    receiver.turn()
    receiver.submit("r", range(1, 20))
    assert receiver.writer.got(WriteGrant) == []
    receiver.turn(40)
    assert len(receiver.writer.got(WriteGrant)) == 1


def test_request_awaiting_memory_fails_when_writer_is_silent():  # [abort-both-ways]
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


def test_admitted_transfers_are_bounded_by_running_limit():
    receiver = Receiver(max_running_requests=2)
    for start in (20, 40, 60):
        receiver.submit(f"r{start}", range(start, start + 6))
    assert len(receiver.writer.got(WriteGrant)) == 2
    receiver.side.engine.scheduler.abort(RequestId("r20"))
    receiver.turn()
    assert receiver.writer.grant().room == "room-r60"


# Receiving


def test_verified_transfer_continues_from_the_first_token(receiver):  # [record-after-writes]
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn()
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")
    receiver.side.assert_clean()
    assert receiver.side.stage.counters.committed == 1


def test_first_token_is_streamed_again_with_the_transfer_report(receiver):
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


def test_pages_may_be_written_in_any_order_and_more_than_once(receiver):  # [writes-repeat]
    grant = receiver.granted()
    receiver.fabric.fates = lambda push: Fate(delay=2 - push.key.first)
    for first in (0, 1, 2, 1, 2):
        receiver.writer.write(grant, first, 1)
    receiver.turn(3)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


def test_no_verification_before_the_handoff_record(receiver):  # [verified-pages]
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn(5)
    assert receiver.side.tokens() == []
    assert not receiver.is_cached()


def test_record_of_pages_that_are_not_there_admits_nothing(receiver):  # [grant-expiry]
    grant = receiver.granted()
    receiver.writer.write(grant, 0, 2)
    receiver.turn(2)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(5)
    receiver.assert_failed("1 of 3 pages did not verify")
    assert not receiver.is_cached()


def test_record_that_comes_again_changes_nothing(receiver):  # [writes-repeat]
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn(2)
    for _ in range(3):
        receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")
    assert receiver.side.stage.counters.ignored == 2


def test_received_prompt_is_cached_for_others(receiver):
    receiver.transferred()
    receiver.turn(3)
    assert receiver.is_cached()


@pytest.mark.parametrize("hits", [CacheHits(host=4, disk=2), None], ids=["told", "by an older release"])
def test_client_learns_where_the_writer_found_its_prefix(receiver, hits):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(PROMPT), cached_tokens=8, cache_hits=hits)
    receiver.turn(20)
    first = receiver.side.engine.received["r"].outputs[0]
    assert (first.cached_tokens, first.cache_hits) == (8, hits)


def test_resumed_request_continues_where_the_client_is(receiver):
    resumed = expected_output(make_message("r", PROMPT, max_tokens=3))
    history = (*PROMPT, *resumed)
    grant = receiver.granted(resume=resumed, max_tokens=8)
    receiver.writer.fill(history)
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(history))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


def test_first_token_that_ends_the_output_finishes_the_request(receiver):
    receiver.transferred(max_tokens=1)
    receiver.turn(3)
    receiver.side.engine.assert_expected("r")
    assert receiver.side.finish().reason is FinishReason.LENGTH
    receiver.side.assert_clean()


# Beside other requests


def test_worker_does_not_hand_over_to_itself(receiver):
    end = handoff(HandoffSide.RECEIVE, receiver.side.peer, ROOM)
    receiver.side.engine.add(make_message("r", PROMPT, handoff=end))
    receiver.turn()
    receiver.assert_failed("itself")
    receiver.side.assert_clean()


def test_second_request_in_a_room_does_not_end_the_first():
    receiver = Receiver(usable_pages=5)
    receiver.granted("first")
    receiver.submit()
    end = handoff(HandoffSide.RECEIVE, WRITER, ROOM)
    receiver.side.engine.add(make_message("again", PROMPT, handoff=end))
    receiver.turn()
    receiver.assert_failed("in use", "again")
    assert receiver.aborts() == []
    assert receiver.side.finish() is None


def test_requests_awaiting_pages_count_toward_queue_limit():
    receiver = Receiver(usable_pages=5, max_queued_requests=2)
    receiver.granted("first")
    for rid in ("second", "third", "fourth"):
        receiver.submit(rid)
    assert receiver.side.finish("fourth").code == "queue_full"
    assert receiver.side.finish("third") is None


def test_open_transfers_reserve_slots_in_running_batch():
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


def test_local_request_does_not_wait_for_quarantined_pages():
    receiver = Receiver(usable_pages=8, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    receiver.granted("lost")
    receiver.side.engine.scheduler.abort(RequestId("lost"))
    receiver.turn()
    assert len(receiver.held()) == 3
    receiver.side.engine.add(make_message("local", range(1, 9), max_tokens=20))
    receiver.submit("waiting", range(20, 44))
    receiver.turn(3)
    assert receiver.side.tokens("local") != []
