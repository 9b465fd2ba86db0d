"""The sending side against a receiver that a test plays line by line."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem_engine.base.names import PageId, RequestId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.prefill import Portions
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.disaggregation.transport import PushFailed
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.outputs import CacheHits, FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import DrainAck, HandoffRecord, StillOpen, TransferAborted
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import CONFIG, HOLD_TIMEOUT, PROMPT, Side, handoff, make_side
from tandem_testing.disagg_script import ScriptedPeer, make_scripted_peer
from tandem_testing.fake_executor import next_token
from tandem_testing.fake_transport import FakeFabric, FakeTransport, Fate
from tandem_testing.scheduler_builders import ADAPTER, VOCAB, expected_output, make_message

ROOM = "room-r"
RECEIVER = make_peer("d")
PAGES = (4, 9, 2)
"""Granted pages for `PROMPT`."""


class Sender:
    """A prefill engine, and the decode engine that the test plays."""

    def __init__(self, num_layers: int = 1, **engine: object) -> None:
        self.fabric, self.network = FakeFabric(), PeerNetwork()
        self.side: Side = make_side(
            make_peer("p"), fabric=self.fabric, network=self.network, num_layers=num_layers, **engine
        )
        self.receiver: ScriptedPeer = make_scripted_peer(
            RECEIVER,
            self.side.peer,
            fabric=self.fabric,
            network=self.network,
            clock=self.side.engine.clock,
            num_layers=num_layers,
        )
        self.receiver.greet()

    def submit(self, rid: str = "r", prompt: Sequence[int] = PROMPT, *, generation: int = 1, **request: object) -> None:
        end = handoff(HandoffSide.SEND, RECEIVER, f"room-{rid}", generation)
        self.side.engine.add(make_message(rid, prompt, handoff=end, **request))

    def allow(self, pages: tuple[int, ...] = PAGES, **grant: object) -> None:
        self.receiver.allow(ROOM, pages, **grant)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.side.step()
            self.fabric.advance()

    def pass_time(self, seconds: float) -> None:
        self.side.engine.clock.time += seconds
        self.turn()

    def records(self) -> list[HandoffRecord]:
        return self.receiver.got(HandoffRecord)

    def aborts(self) -> list[TransferAborted]:
        return self.receiver.got(TransferAborted)

    def acks(self) -> list[DrainAck]:
        return self.receiver.got(DrainAck)

    def hold_back(self, ticks: int = 5) -> None:
        """Let pushes that start from now on take a while."""
        self.fabric.fates = lambda _push: Fate(delay=ticks)

    def assert_gave_up(self, why: str) -> None:
        """The peer was notified; the client has its first token and no error."""
        assert [abort.side for abort in self.aborts()] == [HandoffSide.SEND]
        assert why in self.aborts()[0].reason
        assert not self.aborts()[0].finished
        assert self.records() == []
        assert self.side.finish() is None


@pytest.fixture
def sender() -> Sender:
    return Sender()


def first_token(prompt: Sequence[int] = PROMPT) -> int:
    return next_token(prompt, vocab_size=VOCAB)


# While a step is waited for


def test_pages_written_during_a_step_are_handed_off_in_it(sender):
    sender.allow()
    sender.submit()
    sender.turn()
    assert sender.records() == []
    stage = sender.side.stage
    assert not stage.run_during_forward()
    assert [record.output_ids for record in sender.records()] == [(first_token(),)]
    assert stage.inflight() == 1, "its memory is given back between steps"
    sender.turn()
    assert stage.inflight() == 0
    assert len(sender.records()) == 1
    sender.side.assert_clean()


def test_stage_polls_during_step_only_for_last_pushes(sender):
    stage = sender.side.stage
    assert not stage.run_during_forward()
    sender.hold_back()
    sender.submit()
    sender.turn()
    assert not stage.run_during_forward(), "nothing is granted"
    sender.allow()
    sender.turn()
    assert stage.run_during_forward()
    sender.turn(8)
    assert not stage.run_during_forward()
    assert len(sender.records()) == 1


def test_other_transport_events_in_a_step_apply_after_it(sender):
    sender.hold_back(1)
    sender.allow()
    sender.submit()
    sender.turn()
    stage, events = sender.side.stage, sender.side.transport.events
    sender.fabric.kill(RECEIVER.incarnation)
    sender.fabric.advance()
    assert [type(event) for event in events if isinstance(event, PushFailed)]
    stage.run_during_forward()
    assert not events
    assert stage.prefill.rooms, "a failure closes a room between steps"
    sender.turn()
    assert not stage.prefill.rooms


def test_pushes_of_several_ranks_complete_between_steps(sender, monkeypatch):
    sender.allow()
    sender.submit()
    sender.turn()
    monkeypatch.setattr(FakeTransport, "alone", False)
    assert not sender.side.stage.run_during_forward()
    assert sender.records() == []
    sender.turn()
    assert len(sender.records()) == 1


# Handing over


@pytest.mark.parametrize("computed_turns", [0, 1, 3], ids=["grant first", "grant between", "grant last"])
def test_prompt_arrives_whenever_the_grant_comes(computed_turns):
    sender = Sender(chunked_prefill_size=4)
    sender.submit()
    sender.turn(computed_turns)
    sender.allow()
    sender.turn(6)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert len(sender.records()) == 1
    sender.side.assert_clean()


def test_grant_may_come_before_the_request(sender):
    sender.allow()
    sender.turn()
    sender.submit()
    sender.turn(3)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert len(sender.records()) == 1


def test_client_gets_the_first_token_before_the_transfer_ends(sender):
    sender.submit()
    sender.turn(2)
    assert sender.side.tokens() == [first_token()]
    assert sender.records() == []


def test_handoff_record_has_token_logprobs_and_digests(sender):
    sender.submit(logprobs=0)
    sender.allow()
    sender.turn(3)
    (record,) = sender.records()
    assert (record.room, record.generation, record.sender) == (ROOM, 1, sender.side.peer)
    assert (record.first_token, record.pages) == (0, 3)
    assert record.output_ids == (first_token(),)
    assert len(record.logprobs) == 1
    pages = tuple(PageId(page) for page in PAGES)
    assert (
        record.digests
        == PageDigester(sender.receiver.pool)
        .begin(pages, room=ROOM, generation=1, first=0, tail=len(PROMPT) % 4)
        .take()
    )


def test_record_never_leaves_before_the_last_push_is_done(sender):
    sender.hold_back(ticks=3)
    sender.submit()
    sender.allow()
    sender.turn(3)
    assert sender.records() == []
    sender.turn(3)
    assert len(sender.records()) == 1


def test_pages_that_the_receiver_has_are_not_sent(sender):
    sender.submit()
    sender.allow((9,), first_token=8)
    sender.turn(3)
    assert sender.receiver.tokens_at((9,), 2) == [9, 10]
    assert sender.records()[0].first_token == 8


def test_cached_pages_are_sent_when_the_receiver_lacks_them(sender):
    sender.side.engine.add(make_message("before", PROMPT[:9]))
    sender.turn(20)
    sender.submit()
    sender.allow()
    sender.turn(4)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    [record] = sender.records()
    assert (record.cached_tokens, record.cache_hits) == (8, CacheHits())


def test_only_committed_chunks_are_pushed_without_push_layers():  # [settled-only-sent]
    sender = Sender(chunked_prefill_size=4, enable_overlap=True, config=replace(CONFIG, kv_push_layers=0))
    pushed = []
    sender.fabric.fates = lambda push: pushed.append(push) or Fate()
    sender.submit()
    sender.allow()
    for _ in range(10):
        sender.turn()
        kept = sender.side.engine.scheduler.queues.requests.get(RequestId("r"))
        if kept is not None and kept.kv is not None:
            assert sum(push.key.count for push in pushed) <= kept.kv.committed_len // 4
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_pages_leave_while_their_chunk_is_computed(layers):
    sender = Sender(num_layers=3, enable_overlap=True, config=replace(CONFIG, kv_push_layers=layers))
    pushed = []
    sender.fabric.fates = lambda push: pushed.append(push) or Fate()
    sender.submit()
    sender.allow()
    sender.side.step()
    assert [(push.key.count, push.least_layers) for push in pushed] == [(3, layers)]
    assert pushed[0].progress.layers == 0
    sender.turn(6)
    assert len(pushed) == 1
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert len(sender.records()) == 1
    sender.side.assert_clean()


def test_chunk_of_few_bytes_waits_for_its_end():
    sender = Sender(enable_overlap=True)
    pushed = []
    sender.fabric.fates = lambda push: pushed.append(push) or Fate()
    sender.submit()
    sender.allow()
    sender.turn(6)
    assert {push.progress for push in pushed} == {None}


def test_push_batches_layers_up_to_write_bytes():
    sender = Sender(num_layers=4, enable_overlap=True)
    sender.side.stage.prefill.portions = Portions(push_bytes=1 << 20, write_bytes=3 * 64 * 2)
    pushed = []
    sender.fabric.fates = lambda push: pushed.append(push) or Fate()
    sender.submit()
    sender.allow()
    sender.turn(6)
    assert [push.least_layers for push in pushed] == [2]


@pytest.mark.parametrize(("device", "pages"), [("DRAM", 8), ("VRAM", 32)])
def test_pushes_from_a_device_have_more_pages(sender, device, pages):
    """Of 8 MiB each. What a push costs its host is the same wherever they are."""
    side = sender.side
    side.transport.facts["device"] = device
    stage = HandoffStage.build(
        host=side.engine.scheduler.for_stages,
        transport=side.transport,
        peers=side.link,
        config=CONFIG,
        page_bytes=8 << 20,
        layers=32,
    )
    assert (stage.prefill.max_pages, stage.prefixes.source.max_pages) == (pages, pages)


def test_time_between_the_computation_and_the_record_is_exposed():
    sender = Sender()
    sender.submit()
    sender.turn(2)
    sender.pass_time(0.25)
    sender.allow()
    sender.turn(3)
    assert sender.records()[0].exposed_s == 0.25
    assert (sender.side.stage.counters.handed_over, sender.side.stage.counters.exposed_s) == (1, 0.25)


def test_long_prompt_goes_in_several_pushes(sender):
    sender.side.stage.prefill.portions = Portions(push_bytes=2 * 64, write_bytes=1 << 20)
    starts = []
    sender.fabric.fates = lambda push: starts.append((push.key.first, push.key.count)) or Fate(delay=len(starts) % 3)
    sender.submit("r", range(1, 24))
    sender.allow((1, 2, 3, 4, 5, 6))
    sender.turn(6)
    assert starts == [(0, 2), (2, 2), (4, 1), (5, 1)]
    assert sender.receiver.tokens_at((1, 2, 3, 4, 5, 6), 23) == [*range(1, 24)]
    assert len(sender.records()[0].digests) == 6


def test_resumed_request_is_sent_with_its_output_so_far(sender):
    resumed = expected_output(make_message("r", PROMPT, max_tokens=3))
    sender.submit(resume=resumed, max_tokens=8)
    sender.allow((1, 2, 3, 4))
    sender.turn(4)
    history = [*PROMPT, *resumed]
    assert sender.receiver.tokens_at((1, 2, 3, 4), 13) == history
    assert sender.records()[0].output_ids == (first_token(history),)


def test_request_that_is_not_to_be_sent_decodes_here(sender):
    sender.side.engine.add(make_message("alone"))
    sender.turn(20)
    sender.side.engine.assert_expected("alone")


def test_sent_prompt_stays_cached(sender):
    sender.submit()
    sender.allow()
    sender.turn(5)
    assert sender.side.engine.memory.cached_len(PROMPT, space=BASE_SPACE, max_match=len(PROMPT)) == 8


# Every way to end early


def test_output_that_ends_with_its_first_token_needs_no_transfer(sender):
    sender.submit(max_tokens=1)
    sender.turn(2)
    assert [abort.finished for abort in sender.aborts()] == [True]
    assert sender.side.finish().reason is FinishReason.LENGTH
    sender.side.assert_clean()


def test_grant_for_an_output_that_has_ended_is_answered(sender):  # [abort-both-ways]
    sender.submit(max_tokens=1)
    sender.turn(2)
    sender.allow()
    sender.turn()
    assert [abort.finished for abort in sender.aborts()] == [True, False]


def test_without_a_grant_the_pages_are_kept_only_so_long(sender):
    sender.submit()
    sender.turn(2)
    sender.pass_time(HOLD_TIMEOUT / 2)
    assert not sender.side.engine.scheduler.idle
    sender.pass_time(HOLD_TIMEOUT / 2)
    sender.assert_gave_up("no grant came")
    sender.side.assert_clean()


def test_no_push_starts_after_the_grant_expired():  # [grant-expiry]
    sender = Sender(chunked_prefill_size=4)
    sender.submit()
    sender.allow(valid_s=2.0)
    sender.turn(2)
    sender.pass_time(2.0)
    sender.turn(5)
    sender.assert_gave_up("the grant expired")
    assert sender.receiver.tokens_at(PAGES[2:], 2) == [0, 0]
    sender.side.assert_clean()


@pytest.mark.parametrize(
    "unread", [{"dated": False}, {"granted_at": -30.0}], ids=["of an unknown peer", "that lay unread for half a minute"]
)
def test_doubtful_grant_is_confirmed_before_anything_is_pushed(sender, unread):  # [late-write]
    sender.submit()
    sender.allow(**unread)
    sender.turn(4)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [0] * len(PROMPT)
    question = sender.receiver.got(StillOpen)[-1]
    assert [room.granted for room in question.rooms] == [True]
    sender.receiver.renew(ROOM, sent_at=question.sent_at)
    sender.turn(4)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert len(sender.records()) == 1
    sender.side.assert_clean()


def test_unconfirmed_uncertain_grant_expires(sender):  # [late-write]
    sender.submit()
    sender.allow(granted_at=-30.0, valid_s=2.0)
    sender.turn(3)
    sender.pass_time(2.0)
    sender.turn()
    sender.assert_gave_up("the grant expired")
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [0] * len(PROMPT)
    sender.side.assert_clean()


def test_push_outlasting_its_grant_releases_the_pages(sender):
    sender.hold_back(ticks=1000)
    sender.submit()
    sender.allow(valid_s=2.0)
    sender.turn(3)
    sender.pass_time(2.0)
    sender.assert_gave_up("the grant expired")
    sender.side.assert_clean()


@pytest.mark.parametrize("fate", [Fate(fail=True), Fate(lose_peer=True)])
def test_failed_push_gives_the_transfer_up(sender, fate):
    sender.fabric.fates = lambda _push: fate
    sender.submit()
    sender.allow()
    sender.turn(4)
    sender.assert_gave_up("injected fault" if fate.fail else "peer lost")
    sender.side.assert_clean()


def test_receiver_without_hello_gets_not_connected_error():
    sender = Sender()
    sender.receiver.link.network.links[sender.side.peer.incarnation].inbox.clear()
    sender.submit()
    sender.allow()
    sender.turn(4)
    sender.assert_gave_up("not connected")


def test_grant_that_does_not_fit_is_refused_with_the_reason(sender):
    sender.submit()
    sender.allow((1,))
    sender.turn(3)
    sender.assert_gave_up("grant of 1 pages where the prompt needs 3")


def test_grant_by_another_receiver_is_refused(sender):
    foreign = make_scripted_peer(
        make_peer("q"), sender.side.peer, fabric=sender.fabric, network=sender.network, clock=sender.side.engine.clock
    )
    sender.submit()
    foreign.allow(ROOM, PAGES)
    sender.turn(3)
    sender.assert_gave_up("grant by q@1")


def test_second_grant_in_a_room_is_ignored(sender):
    sender.submit()
    sender.allow()
    sender.allow((5, 6, 7))
    sender.turn(4)
    assert sender.receiver.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert sender.receiver.tokens_at((5, 6, 7), len(PROMPT)) == [0] * len(PROMPT)
    assert sender.side.stage.counters.ignored == 1


def test_grant_of_another_generation_waits_for_its_own_request(sender):
    sender.submit()
    sender.allow(generation=2)
    sender.turn(3)
    assert sender.records() == []
    sender.allow()
    sender.turn(3)
    assert [record.generation for record in sender.records()] == [1]


def test_abort_by_gateway_notifies_receiver(sender):  # [abort-both-ways]
    sender.submit()
    sender.turn(2)
    sender.side.engine.scheduler.abort(RequestId("r"))
    sender.turn()
    assert sender.side.finish().reason is FinishReason.ABORT
    assert len(sender.aborts()) == 1
    sender.side.assert_clean()


def test_abort_while_computing_notifies_receiver():  # [abort-both-ways]
    sender = Sender(chunked_prefill_size=4)
    sender.submit()
    sender.allow()
    sender.turn()
    sender.side.engine.scheduler.abort(RequestId("r"))
    sender.turn(3)
    assert len(sender.aborts()) == 1
    assert sender.records() == []
    sender.side.assert_clean()


def test_request_rejected_at_admission_notifies_receiver(sender):  # [abort-both-ways]
    sender.side.engine.scheduler.drain()
    sender.submit()
    sender.turn()
    assert [abort.room for abort in sender.aborts()] == [ROOM]
    sender.allow()
    sender.turn()
    assert len(sender.aborts()) == 2


def test_receiver_abort_is_acked_without_outstanding_push(sender):  # [ack-per-grant]
    sender.submit()
    sender.turn(2)
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn(2)
    assert [(ack.room, ack.generation) for ack in sender.acks()] == [(ROOM, 1)]
    assert sender.aborts() == []
    sender.side.assert_clean()


def test_receivers_abort_is_acked_after_the_last_push(sender):  # [late-write] [ack-per-grant]
    sender.hold_back(ticks=3)
    sender.submit()
    sender.allow()
    sender.turn(2)
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn()
    assert sender.acks() == []
    sender.turn(4)
    assert len(sender.acks()) == 1
    assert sender.records() == []
    sender.side.assert_clean()


def test_nothing_is_pushed_into_a_room_that_was_acked():  # [late-write]
    sender = Sender(chunked_prefill_size=4)
    sender.submit()
    sender.allow()
    sender.turn()
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn(6)
    assert len(sender.acks()) == 1
    assert sender.receiver.tokens_at(PAGES[1:], 6) == [0] * 6
    assert sender.side.tokens() == [first_token()]


def test_abort_for_an_unknown_room_is_acked_and_closes_it(sender):  # [ack-per-grant]
    sender.allow()
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn()
    assert len(sender.acks()) == 1
    assert len(sender.side.stage.prefill.early) == 0
    sender.submit()
    sender.allow()
    sender.turn(4)
    assert sender.records() == []
    assert sender.receiver.tokens_at(PAGES, 10) == [0] * 10
    assert sender.side.tokens() == [first_token()]
    sender.side.assert_clean()


def test_abort_after_the_handover_is_acked(sender):
    sender.submit()
    sender.allow()
    sender.turn(4)
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn()
    assert len(sender.acks()) == 1


def test_abort_from_other_peer_does_not_stop_sender(sender):
    foreign = make_scripted_peer(
        make_peer("q"), sender.side.peer, fabric=sender.fabric, network=sender.network, clock=sender.side.engine.clock
    )
    sender.submit()
    foreign.abort(HandoffSide.RECEIVE, ROOM)
    sender.allow()
    sender.turn(4)
    assert len(foreign.got(DrainAck)) == 1
    assert len(sender.records()) == 1


def test_dead_receiver_frees_the_pages_at_once(sender):  # [dead-peer-released]
    sender.hold_back(ticks=1000)
    sender.submit()
    sender.allow()
    sender.turn(3)
    sender.side.stage.peer_gone(RECEIVER.incarnation)
    sender.turn(2)
    sender.side.assert_clean()
    assert sender.side.finish() is None
    assert RECEIVER.incarnation not in sender.side.transport.connected


def test_dead_receiver_is_sent_no_ack_when_its_last_push_fails(sender):  # [dead-peer-released]
    sender.hold_back(ticks=1000)
    sender.submit()
    sender.allow()
    sender.turn(3)
    sender.receiver.abort(HandoffSide.RECEIVE, ROOM)
    sender.turn()
    sender.side.stage.peer_gone(RECEIVER.incarnation)
    sender.turn(2)
    assert sender.acks() == []
    sender.side.assert_clean()


def test_grants_of_a_dead_receiver_are_not_written_to(sender):  # [dead-peer-released]
    sender.allow()
    sender.turn()
    sender.side.stage.peer_gone(RECEIVER.incarnation)
    sender.receiver.greet()
    sender.submit()
    sender.turn(4)
    assert sender.receiver.tokens_at(PAGES, 10) == [0] * 10
    assert sender.records() == []


def test_receiver_that_takes_no_messages_is_given_up(sender):
    sender.submit()
    sender.allow()
    sender.turn()
    sender.side.link.unreachable.add(RECEIVER.incarnation)
    sender.turn(3)
    assert sender.side.stage.counters.failed == 1
    sender.side.assert_clean()


def test_failure_is_logged_with_its_room_and_reason(sender, caplog):
    sender.submit()
    sender.turn(2)
    sender.pass_time(HOLD_TIMEOUT)
    assert "room 'room-r/1': handoff to d@1 failed: no grant came" in caplog.text


def test_outcomes_of_pushes_in_closed_rooms_are_taken_quietly(sender):
    sender.hold_back(ticks=4)
    sender.submit()
    sender.allow()
    sender.turn(3)
    sender.side.engine.scheduler.abort(RequestId("r"))
    sender.turn(6)
    assert not any(isinstance(event, PushFailed) for event in sender.side.transport.events)
    assert len(sender.aborts()) == 1
    sender.side.assert_clean()


def test_deadline_of_a_request_kept_for_its_transfer_is_named(sender):  # [abort-both-ways]
    sender.submit(deadline_s=2.0)
    sender.turn(2)
    sender.pass_time(2.0)
    finish = sender.side.finish()
    assert (finish.reason, finish.code) == (FinishReason.ABORT, "deadline_exceeded")
    assert len(sender.aborts()) == 1
    sender.side.assert_clean()


def test_grant_for_kv_of_another_adapter_gets_nothing(sender):  # [abort-both-ways]
    sender.submit(adapter=ADAPTER)
    sender.allow()
    sender.turn(20)
    assert [abort.room for abort in sender.aborts()] == [ROOM]
    assert "grant for KV of the base model" in sender.aborts()[0].reason
    assert not sender.records()
