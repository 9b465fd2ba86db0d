"""When a peer may be notified that its pages are safe."""

from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.grants import AckDue, ClosedRooms, DrainBook
from tandem_engine.disaggregation.transport import PushKey
from tandem_testing.disagg_network import make_peer

DECODE = make_peer("d")
ROOM = room_key("room", 1)
DUE = AckDue(ROOM, DECODE)


def push(first: int, *, generation: int = 1) -> PushKey:
    return PushKey(room="room", generation=generation, first=first, count=1)


def test_room_with_nothing_outstanding_is_acked_at_once():  # [ack-per-grant]
    assert DrainBook().ask(ROOM, DECODE) == DUE


def test_ack_waits_for_the_last_outstanding_push():  # [ack-per-grant]
    book = DrainBook()
    book.started(push(0), DECODE.incarnation)
    book.started(push(1), DECODE.incarnation)
    assert book.ask(ROOM, DECODE) is None
    assert book.ended(push(1)) is None
    assert book.ended(push(0)) == DUE


def test_pushes_without_abort_are_not_acked():
    book = DrainBook()
    book.started(push(0), DECODE.incarnation)
    assert book.ended(push(0)) is None


def test_ack_is_sent_once_for_each_question():
    book = DrainBook()
    assert book.ask(ROOM, DECODE) == DUE
    assert book.ask(ROOM, DECODE) == DUE
    book.started(push(0), DECODE.incarnation)
    assert book.ended(push(0)) is None


def test_another_generation_of_the_room_does_not_delay_the_ack():  # [ack-per-grant]
    book = DrainBook()
    book.started(push(0, generation=2), DECODE.incarnation)
    assert book.ask(ROOM, DECODE) == DUE


def test_another_peer_in_the_room_does_not_delay_the_ack():  # [ack-per-grant]
    book = DrainBook()
    book.started(push(0), "d@2")
    assert book.ask(ROOM, DECODE) == DUE


def test_dead_peer_is_owed_nothing_and_its_pushes_still_end():
    book = DrainBook()
    book.started(push(0), DECODE.incarnation)
    book.ask(ROOM, DECODE)
    book.drop(DECODE.incarnation)
    assert book.ended(push(0)) is None


def test_closed_rooms_forget_the_oldest_beyond_their_capacity():
    closed = ClosedRooms(capacity=2)
    for generation in (1, 2, 3):
        closed.add(room_key("room", generation))
    assert [room_key("room", generation) in closed for generation in (1, 2, 3)] == [False, True, True]
