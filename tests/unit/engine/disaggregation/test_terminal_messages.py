"""The final message of a room is kept for as long as a peer may ask for it."""

import pytest

from tandem_engine.disaggregation.base import RoomKey, room_key
from tandem_engine.disaggregation.notifications import FinalMessages
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import TransferAborted
from tandem_testing.disagg_network import make_peer
from tandem_testing.scheduler_builders import ManualClock

KEEP_S = 8.0
ME, PEER, OTHER_PEER = make_peer("p"), make_peer("d"), make_peer("q")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def messages(clock):
    return FinalMessages(clock=clock, keep_s=KEEP_S, capacity=2)


def key_of(room: str) -> RoomKey:
    return room_key(room, 1)


def ended(room: str, reason: str = "over") -> TransferAborted:
    return TransferAborted(room=room, generation=1, sender=ME, side=HandoffSide.SEND, reason=reason)


def test_terminal_message_is_repeated_only_to_its_peer_and_room(messages):
    messages.keep(key_of("a"), PEER, ended("a"))
    assert messages.sent_to(key_of("a"), PEER) == ended("a")
    assert messages.sent_to(key_of("a"), OTHER_PEER) is None
    assert messages.sent_to(key_of("b"), PEER) is None
    assert messages.sent_to(room_key("a", 2), PEER) is None


def test_newest_terminal_message_is_kept(messages):
    messages.keep(key_of("a"), PEER, ended("a"))
    messages.keep(key_of("a"), PEER, ended("a", "really over"))
    assert messages.sent_to(key_of("a"), PEER) == ended("a", "really over")


def test_terminal_message_expires_after_keep_time(messages, clock):
    messages.keep(key_of("a"), PEER, ended("a"))
    clock.time += KEEP_S / 2
    messages.keep(key_of("b"), PEER, ended("b"))
    clock.time += KEEP_S / 2
    messages.drop_expired()
    assert messages.sent_to(key_of("a"), PEER) is None
    assert messages.sent_to(key_of("b"), PEER) == ended("b")


def test_oldest_makes_room(messages):
    for room in "abc":
        messages.keep(key_of(room), PEER, ended(room))
    assert [messages.sent_to(key_of(room), PEER) for room in "abc"] == [None, ended("b"), ended("c")]


def test_terminal_messages_of_dead_receiver_are_dropped(messages):
    messages.keep(key_of("a"), PEER, ended("a"))
    messages.keep(key_of("b"), OTHER_PEER, ended("b"))
    messages.drop_to(PEER.incarnation)
    assert messages.sent_to(key_of("a"), PEER) is None
    assert messages.sent_to(key_of("b"), OTHER_PEER) == ended("b")
