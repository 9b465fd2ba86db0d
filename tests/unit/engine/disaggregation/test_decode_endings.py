"""Every way in which a handoff ends early at its receiver: which peers are notified, and when its pages are free
again."""

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.disaggregation.digest import unproved
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import DrainAck, Hello, WriteGrant
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import DRAIN_TIMEOUT, GRANT_TIMEOUT, PROMPT
from tandem_testing.disagg_played import ROOM, WRITER, Receiver, first_token
from tandem_testing.disagg_script import make_scripted_peer
from tandem_testing.fake_transport import FakeTransport, Fate
from tandem_testing.scheduler_builders import make_message


def test_abort_keeps_the_pages_until_the_writer_acks(receiver):  # [late-write]
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


def test_late_write_after_abort_corrupts_no_request(receiver):  # [late-write] [late-signal-ignored]
    grant = receiver.granted()
    receiver.fabric.fates = lambda _push: Fate(delay=4)
    receiver.writer.write(grant)
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.side.engine.add(make_message("other", range(30, 50)))
    receiver.turn(40)
    receiver.side.engine.assert_expected("other")
    receiver.drain()
    receiver.side.assert_clean()


def test_abort_while_waiting_holds_nothing():
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    receiver.side.engine.scheduler.abort(RequestId("s"))
    receiver.turn()
    assert receiver.side.finish("s").reason is FinishReason.ABORT
    assert [abort.room for abort in receiver.aborts()] == ["room-s"]


def test_abort_during_verification_is_obeyed(receiver):
    receiver.transferred()
    receiver.fabric.advance()
    receiver.side.stage.poll()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn(3)
    assert receiver.side.finish().reason is FinishReason.ABORT
    assert not receiver.is_cached()
    receiver.drain()
    receiver.side.assert_clean()


def test_pages_are_free_once_they_are_unpacked(receiver, monkeypatch):  # [late-write]
    """An order to unpack may be carried out after the writer has acked: it writes to the pages."""
    orders = []
    monkeypatch.setattr(FakeTransport, "digest", lambda transport, order: orders.append((transport, order)))
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.turn()
    receiver.writer.record(grant, first_token(PROMPT), packed=True)
    receiver.turn()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.drain()
    receiver.side.stage.peer_gone(WRITER.incarnation)
    receiver.side.stage.peer_ended(WRITER.incarnation)
    receiver.turn()
    assert receiver.held() == [*grant.pages]
    [(transport, order)] = orders
    transport.events.append(unproved(order))
    receiver.turn()
    assert receiver.held() == []
    receiver.side.assert_clean()


def test_abort_after_transfer_sends_writer_no_message(receiver):
    receiver.transferred()
    receiver.turn(4)
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn(3)
    assert receiver.aborts() == []
    receiver.side.assert_clean()


def test_rejected_request_sends_abort_to_the_writer(receiver):  # [abort-both-ways]
    receiver.side.engine.scheduler.drain()
    receiver.submit()
    assert [abort.room for abort in receiver.aborts()] == [ROOM]


def test_transfer_of_silent_writer_fails_and_drains(receiver):  # [grant-expiry]
    grant = receiver.granted()
    receiver.writer.write(grant, 0, 1)
    receiver.turn()
    receiver.pass_time(GRANT_TIMEOUT)
    receiver.assert_failed("fell silent")
    assert receiver.held() == [*grant.pages]
    receiver.drain()
    receiver.side.assert_clean()


def test_pages_without_ack_are_quarantined_until_writer_exits(receiver):  # [late-write]
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


def test_abort_is_repeated_and_late_ack_ends_quarantine(receiver):  # [ack-per-grant]
    receiver.granted()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn()
    receiver.pass_time(DRAIN_TIMEOUT)
    receiver.pass_time(DRAIN_TIMEOUT)
    assert len(receiver.aborts()) == 3
    assert receiver.side.stage.counters.quarantined == 1
    receiver.drain()
    receiver.side.assert_clean()


def test_newer_incarnation_of_the_writer_fences_it(receiver):  # [dead-peer-released]
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


def test_writer_giving_up_fails_the_request(receiver):  # [abort-both-ways]
    receiver.granted()
    receiver.writer.abort(HandoffSide.SEND, ROOM)
    receiver.turn()
    receiver.assert_failed("gave up: scripted")
    receiver.drain()
    receiver.side.assert_clean()


def test_writer_giving_up_reaches_a_request_that_still_waits():  # [abort-both-ways]
    receiver = Receiver(usable_pages=5)
    receiver.granted()
    receiver.submit("s", range(20, 30))
    receiver.writer.abort(HandoffSide.SEND, "room-s")
    receiver.turn()
    receiver.assert_failed("gave up", "s")


@pytest.mark.parametrize("granted", [True, False])
def test_output_that_ended_with_its_first_token_ends_silently(granted):
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


def test_abort_from_other_peer_or_generation_is_ignored(receiver):
    receiver.granted()
    foreign = make_scripted_peer(
        make_peer("q"),
        receiver.side.peer,
        fabric=receiver.fabric,
        network=receiver.network,
        clock=receiver.side.engine.clock,
    )
    foreign.abort(HandoffSide.SEND, ROOM)
    receiver.writer.abort(HandoffSide.SEND, ROOM, generation=2)
    receiver.turn()
    assert receiver.side.finish() is None
    assert receiver.side.stage.counters.ignored == 2


def test_exited_writer_fails_its_requests_and_frees_pages(receiver):  # [dead-peer-released]
    receiver.granted()
    receiver.granted("s", range(20, 30))
    receiver.side.stage.peer_ended(WRITER.incarnation)
    receiver.turn()
    receiver.assert_failed("is gone", "r")
    receiver.assert_failed("is gone", "s")
    receiver.side.assert_clean()


def test_late_ack_of_fenced_writer_frees_its_pages(receiver):  # [late-write]
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


def test_late_signals_of_a_finished_transfer_are_ignored(receiver):  # [late-signal-ignored]
    grant = receiver.transferred()
    receiver.turn(4)
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1)
    receiver.writer.send(DrainAck(room=ROOM, generation=1, sender=WRITER))
    receiver.writer.abort(HandoffSide.SEND, ROOM)
    receiver.side.step()
    assert receiver.side.finish() is None
    assert receiver.side.stage.counters.ignored == 3


def test_transport_expects_writes_only_during_open_transfers(receiver):
    grant = receiver.granted()
    assert receiver.side.transport.expected == 1
    receiver.writer.write(grant)
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(4)
    assert receiver.side.transport.expected == 0


@pytest.mark.parametrize("stage", ["waiting", "receiving"])
def test_deadline_of_a_request_without_its_kv_is_named(stage):  # [abort-both-ways]
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
