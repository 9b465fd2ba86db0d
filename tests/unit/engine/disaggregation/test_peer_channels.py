"""Messages between engines over real sockets on the loopback."""

import socket
import time

import msgspec
import pytest

from tandem_engine.base.names import DigestKind
from tandem_engine.base.release import RELEASE, WINDOW
from tandem_engine.disaggregation import peers
from tandem_engine.disaggregation.peers import PeerChannels, PeerEvent, Superseded
from tandem_engine.ipc.channels import DealerChannel, IpcContext, RouterChannel
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import DrainAck, PeerMessage, TransferAborted, WriteGrant
from tandem_testing.disagg_network import COMPAT

TIMEOUT_S = 60.0


@pytest.fixture
def context():
    context = IpcContext()
    yield context
    context.close()


def open_channels(
    context: IpcContext,
    worker_id: str,
    number: int = 1,
    *,
    port: int = 0,
    compat: str = COMPAT,
    release: int = RELEASE,
) -> PeerChannels:
    inbound: RouterChannel[PeerMessage, PeerMessage] = RouterChannel(
        context, "127.0.0.1", port, inbound=PeerMessage, outbound=PeerMessage
    )
    me = Peer(
        worker_id=worker_id,
        incarnation=f"{worker_id}@{number}",
        endpoint=inbound.endpoint,
        compat_hash=compat,
        release=release,
    )
    return PeerChannels(context=context, inbound=inbound, me=me)


def ack(sender: PeerChannels, room: str = "room") -> DrainAck:
    return DrainAck(room=room, generation=1, sender=sender.me)


def aborted(sender: PeerChannels) -> TransferAborted:
    return TransferAborted(room="room", generation=1, sender=sender.me, side=HandoffSide.RECEIVE, reason="over")


def grant(sender: PeerChannels, writer: str) -> WriteGrant:
    return WriteGrant(
        room="room",
        generation=1,
        sender=sender.me,
        writer=writer,
        first_token=0,
        pages=(1,),
        granted_at=0.0,
        valid_s=8.0,
        digest=DigestKind.SAMPLED,
    )


def receive(channels: PeerChannels, count: int = 1) -> list[PeerEvent]:
    """Wait for `count` events."""
    events: list[PeerEvent] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {events} came"
        channels.inbound.socket.poll(100)
        events += channels.receive()
    return events


def refuse(channels: PeerChannels) -> list[PeerEvent]:
    """Wait until one message was refused; returns what was accepted in the meantime."""
    events: list[PeerEvent] = []
    deadline = time.monotonic() + TIMEOUT_S
    while channels.refused == 0:
        assert time.monotonic() < deadline, "nothing was refused"
        channels.inbound.socket.poll(100)
        events += channels.receive()
    return events


@pytest.fixture
def prefill(context):
    channels = open_channels(context, "p")
    yield channels
    channels.close()


@pytest.fixture
def decode(context):
    channels = open_channels(context, "d")
    yield channels
    channels.close()


def test_messages_arrive_in_the_order_they_were_sent(prefill, decode):
    for i in range(20):
        assert prefill.send(decode.me, ack(prefill, f"room-{i}"))
    assert [message.room for message in receive(decode, 20)] == [f"room-{i}" for i in range(20)]


def test_message_may_be_sent_before_the_peer_listens(context, prefill):
    with socket.socket() as placeholder:
        # No process listens, and no other one is given the port; one that requests this port may have it all the same.
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        later = Peer(worker_id="d", incarnation="d@1", endpoint=f"tcp://127.0.0.1:{port}", compat_hash=COMPAT)
        assert prefill.send(later, ack(prefill))
        decode = open_channels(context, "d", port=port)
    assert receive(decode) == [ack(prefill)]
    decode.close()


def test_grant_for_another_incarnation_is_dropped(prefill, decode):
    decode.send(prefill.me, grant(decode, "p@2"))
    assert refuse(prefill) == []
    decode.send(prefill.me, grant(decode, "p@1"))
    assert receive(prefill) == [grant(decode, "p@1")]


def test_engine_with_kv_of_another_shape_is_not_listened_to(context, decode):
    alien = open_channels(context, "p", compat="other-shape")
    alien.send(decode.me, grant(alien, "d@1"))
    assert refuse(decode) == []
    alien.close()


def test_transfer_end_is_accepted_after_weights_of_peer_change(prefill, decode):  # [ack-per-grant]
    decode.send(prefill.me, grant(decode, "p@1"))
    assert receive(prefill) == [grant(decode, "p@1")]
    prefill.me = msgspec.structs.replace(prefill.me, compat_hash="other-weights")
    decode.send(prefill.me, aborted(decode))
    assert receive(prefill) == [aborted(decode)]
    prefill.send(decode.me, ack(prefill))
    assert receive(decode) == [ack(prefill)]


def test_sender_with_contradictory_names_is_not_listened_to(prefill, decode):
    forged = Peer(worker_id="p", incarnation="q@1", endpoint="", compat_hash=COMPAT)
    prefill.send(decode.me, DrainAck(room="room", generation=1, sender=forged))
    assert refuse(decode) == []


@pytest.mark.parametrize(
    "absurd",
    [
        {"incarnation": "nobody"},
        {"incarnation": "d@-1"},
        {"incarnation": "d@" + "9" * 5000},
        {"endpoint": ""},
        {"endpoint": "carrier pigeon"},
        {"endpoint": "tcp://127.0.0.1"},
    ],
    ids=lambda absurd: next(iter(absurd)),
)
def test_peer_that_cannot_exist_is_unreachable_and_no_error(prefill, decode, absurd):  # [wire-refused]
    assert not prefill.send(msgspec.structs.replace(decode.me, **absurd), ack(prefill))
    assert prefill.send(decode.me, ack(prefill))
    assert receive(decode) == [ack(prefill)]


def test_wrong_endpoint_does_not_stay_with_a_peer(prefill, decode):  # [wire-refused]
    elsewhere = msgspec.structs.replace(decode.me, endpoint="tcp://127.0.0.1:1")
    assert prefill.send(elsewhere, ack(prefill, "lost"))
    assert prefill.send(decode.me, ack(prefill))
    assert receive(decode) == [ack(prefill)]


def test_messages_arrive_at_each_endpoint_of_a_peer(context, prefill, decode):
    """Grants were lost by the dozen where the registry named the address of a proxy and peers answered each other."""
    proxy: RouterChannel[PeerMessage, PeerMessage] = RouterChannel(
        context, "127.0.0.1", 0, inbound=PeerMessage, outbound=PeerMessage
    )
    behind_it = msgspec.structs.replace(decode.me, endpoint=proxy.endpoint)
    rooms = [f"room-{number}" for number in range(20)]
    for room in rooms:
        assert prefill.send(behind_it, ack(prefill, f"{room} by proxy"))
        assert prefill.send(decode.me, ack(prefill, room))
    assert receive(decode, len(rooms)) == [ack(prefill, room) for room in rooms]
    passed: list[str] = []
    while len(passed) < len(rooms):
        assert proxy.socket.poll(TIMEOUT_S * 1000), f"only {passed} came"
        passed += [message.room for _, message in proxy.receive()]
    assert passed == [f"{room} by proxy" for room in rooms]
    prefill.fence(decode.me.incarnation)
    assert prefill.open_channels == []
    proxy.close()


def test_sender_with_overlong_incarnation_is_rejected(prefill, decode):  # [wire-refused]
    forged = Peer(worker_id="p", incarnation="p@" + "9" * 5000, endpoint="", compat_hash=COMPAT)
    prefill.send(decode.me, DrainAck(room="room", generation=1, sender=forged))
    assert refuse(decode) == []


def test_oldest_of_too_many_channels_makes_room(monkeypatch, prefill, decode):
    monkeypatch.setattr(peers, "MAX_CHANNELS", 2)
    for number in range(5):
        foreign = msgspec.structs.replace(decode.me, worker_id=f"s{number}", incarnation=f"s{number}@1")
        assert prefill.send(foreign, ack(prefill, f"room-{number}"))
        receive(decode)
    assert len(prefill.open_channels) == 2


def test_undecodable_message_is_counted_and_the_next_one_read(context, prefill, decode):
    raw: DealerChannel[PeerMessage] = DealerChannel(context, decode.me.endpoint, outbound=PeerMessage)
    raw.socket.send(b"\x01rubbish")
    assert refuse(decode) == []
    prefill.send(decode.me, ack(prefill))
    assert receive(decode) == [ack(prefill)]
    raw.close()


def test_newer_incarnation_is_reported_first_and_fences_older(context, prefill, decode):
    prefill.send(decode.me, ack(prefill))
    receive(decode)
    restarted = open_channels(context, "p", 2)
    restarted.send(decode.me, ack(restarted))
    assert receive(decode, 2) == [Superseded("p@1"), ack(restarted)]
    prefill.send(decode.me, ack(prefill))
    assert refuse(decode) == []
    restarted.close()


def test_nothing_is_sent_to_a_superseded_incarnation(context, prefill, decode):
    restarted = open_channels(context, "p", 2)
    restarted.send(decode.me, ack(restarted))
    receive(decode)
    assert not decode.send(prefill.me, ack(decode))
    assert decode.send(restarted.me, ack(decode))
    assert receive(restarted) == [ack(decode)]
    restarted.close()


def test_message_after_fence_is_answered(prefill, decode):
    decode.send(prefill.me, ack(decode))
    receive(prefill)
    decode.fence(prefill.me.incarnation)
    decode.fence(prefill.me.incarnation)
    prefill.send(decode.me, ack(prefill))
    receive(decode)
    assert decode.send(prefill.me, ack(decode))
    assert receive(prefill) == [ack(decode)]


def test_grant_from_outside_the_window_is_dropped_by_name(context, decode, caplog):
    later = open_channels(context, "p", release=RELEASE + WINDOW + 1)
    later.send(decode.me, grant(later, "d@1"))
    assert refuse(decode) == []
    assert f"release {RELEASE + WINDOW + 1}, outside the window of release {RELEASE}" in caplog.text
    later.send(decode.me, aborted(later))
    assert receive(decode) == [aborted(later)]
    later.close()


def test_grant_from_the_edge_of_the_window_is_accepted(context, decode):
    later = open_channels(context, "p", release=RELEASE + WINDOW)
    later.send(decode.me, grant(later, "d@1"))
    assert receive(decode) == [grant(later, "d@1")]
    later.close()
