"""Which pages of a sequence may be pushed, and whether what was pushed can be vouched for."""

import pytest

from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.room_key import room_key
from tandem_engine.disaggregation.send_room import SendRoom
from tandem_engine.disaggregation.transport import Push
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.names import DigestKind, PageId, ReqPoolIdx, RequestId
from tandem_engine.scheduler.request import Request
from tandem_testing.disagg_network import make_peer

RECEIVER = make_peer("d")
KEY = room_key("room", 1)


def ids(*pages: int) -> tuple[PageId, ...]:
    return tuple(PageId(page) for page in pages)


def make_room(*, settled: int, first_token: int = 0, granted: tuple[int, ...] = (11, 12, 13)) -> SendRoom:
    """A prompt of ten tokens on pages 1, 2 and 3 of four tokens, computed up to `settled`."""
    kv = RequestKv(row=ReqPoolIdx(1), salt="", page_size=4, pages=[*ids(1, 2, 3)], committed_len=settled)
    req = Request(
        rid=RequestId("r"),
        origin_input_ids=tuple(range(1, 11)),
        sampling=SamplingParams(max_tokens=4),
        kv=kv,
    )
    grant = Grant(
        key=KEY, receiver=RECEIVER, first_token=first_token, pages=ids(*granted), expires=8.0, digest=DigestKind.FULL
    )
    return SendRoom(key=KEY, req=req, peer=RECEIVER, total=10, grant=grant)


def pushes(room: SendRoom, max_pages: int = 100) -> list[Push]:
    """Start everything that may start."""
    started = []
    while (push := room.next_push(max_pages)) is not None:
        room.started(push)
        started.append(push)
    return started


def test_whole_settled_pages_go_once():  # T70
    room = make_room(settled=7)
    (push,) = pushes(room)
    assert (push.source, push.target, push.start_before) == (ids(1), ids(11), 8.0)
    assert pushes(room) == []
    room.req.kv.committed_len = 8
    assert [push.source for push in pushes(room)] == [ids(2)]


def test_the_partial_page_waits_until_the_request_is_kept_for_its_transfer():
    room = make_room(settled=10)
    assert [push.source for push in pushes(room)] == [ids(1, 2)]
    room.keep_until = 6.0
    assert [push.source for push in pushes(room)] == [ids(3)]


def test_the_partial_page_waits_for_steps_that_may_still_write_to_it():
    room = make_room(settled=10)
    room.keep_until = 6.0
    room.req.steps_in_flight = 1
    assert [push.source for push in pushes(room)] == [ids(1, 2)]
    room.req.steps_in_flight = 0
    assert [push.source for push in pushes(room)] == [ids(3)]


def test_output_beyond_the_handed_over_sequence_is_not_pushed():
    room = make_room(settled=10)
    room.keep_until = 6.0
    room.req.kv.committed_len = 12
    assert sum(push.key.count for push in pushes(room)) == 3


def test_a_grant_for_the_tail_takes_the_tail():
    room = make_room(settled=10, first_token=4, granted=(11, 12))
    room.keep_until = 6.0
    assert [(push.source, push.target) for push in pushes(room)] == [(ids(2, 3), ids(11, 12))]


def test_pushes_are_no_longer_than_allowed():
    room = make_room(settled=8)
    assert [push.key.first for push in pushes(room, max_pages=1)] == [0, 1]


@pytest.mark.parametrize("lacking", ["grant", "kv"])
def test_nothing_goes_without_a_grant_or_without_kv(lacking):
    room = make_room(settled=8)
    setattr(room if lacking == "grant" else room.req, lacking, None)
    assert pushes(room) == []


def test_digests_stand_in_the_order_of_the_pages_whatever_order_pushes_end_in():
    room = make_room(settled=10)
    room.keep_until = 6.0
    for push in reversed(pushes(room, max_pages=1)):
        assert not room.complete
        assert room.done(push.key, (100 + push.key.first,))
    assert room.complete
    assert room.all_digests() == (100, 101, 102)


@pytest.mark.parametrize("pages", [(1, 9, 3), ()])
def test_a_push_whose_source_changed_hands_is_not_vouched_for(pages):
    room = make_room(settled=8)
    (push,) = pushes(room)
    room.req.kv.pages = [*ids(*pages)]
    assert not room.done(push.key, (1, 2))


def test_a_push_that_outlived_the_requests_kv_is_not_vouched_for():
    room = make_room(settled=8)
    (push,) = pushes(room)
    room.req.kv = None
    assert not room.done(push.key, (1, 2))
