"""Which pages of a sequence may be pushed, and whether what was pushed can be vouched for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.names import DigestKind, PageId, ReqPoolIdx, RequestId
from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.outgoing_transfer import SendRoom
from tandem_engine.disaggregation.transport import Push
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.request import Request
from tandem_testing.disagg_network import make_peer
from tandem_testing.scheduler_builders import ManualClock

RECEIVER = make_peer("d")
KEY = room_key("room", 1)


def ids(*pages: int) -> tuple[PageId, ...]:
    return tuple(PageId(page) for page in pages)


def make_room(*, settled: int, first_token: int = 0, granted: tuple[int, ...] = (11, 12, 13)) -> SendRoom:
    """A prompt of ten tokens on pages 1, 2 and 3 of four tokens, computed up to `settled`."""
    kv = RequestKv(row=ReqPoolIdx(1), space=BASE_SPACE, page_size=4, pages=[*ids(1, 2, 3)], committed_len=settled)
    req = Request(
        rid=RequestId("r"),
        origin_input_ids=tuple(range(1, 11)),
        sampling=SamplingParams(max_tokens=4),
        kv=kv,
    )
    grant = Grant(
        key=KEY,
        receiver=RECEIVER,
        first_token=first_token,
        pages=ids(*granted),
        expires=8.0,
        answer_by=8.0,
        digest=DigestKind.FULL,
    )
    return SendRoom(key=KEY, req=req, peer=RECEIVER, total=10, grant=grant)


def pushes(room: SendRoom, max_pages: int = 100) -> list[Push]:
    """Start everything that may start."""
    started = []
    while (push := room.next_push(max_pages)) is not None:
        room.started(push)
        started.append(push)
    return started


def test_full_committed_pages_are_pushed_once():  # [settled-only-sent]
    room = make_room(settled=7)
    (push,) = pushes(room)
    assert (push.source, push.target, push.start_before) == (ids(1), ids(11), 8.0)
    assert pushes(room) == []
    room.req.kv.committed_len = 8
    assert [push.source for push in pushes(room)] == [ids(2)]


def test_partial_page_is_pushed_once_request_is_kept():
    room = make_room(settled=10)
    assert [push.source for push in pushes(room)] == [ids(1, 2)]
    room.keep_until = 6.0
    assert [push.source for push in pushes(room)] == [ids(3)]


def test_partial_page_waits_for_steps_that_may_still_write_to_it():
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


def test_grant_for_the_tail_takes_the_tail():
    room = make_room(settled=10, first_token=4, granted=(11, 12))
    room.keep_until = 6.0
    assert [(push.source, push.target) for push in pushes(room)] == [(ids(2, 3), ids(11, 12))]


def test_pushes_are_no_longer_than_allowed():
    room = make_room(settled=8)
    assert [push.key.first for push in pushes(room, max_pages=1)] == [0, 1]


@pytest.mark.parametrize("lacking", ["grant", "kv"])
def test_no_page_is_pushed_without_a_grant_or_without_kv(lacking):
    room = make_room(settled=8)
    setattr(room if lacking == "grant" else room.req, lacking, None)
    assert pushes(room) == []


def test_digests_follow_page_order_for_any_push_order():
    room = make_room(settled=10)
    room.keep_until = 6.0
    for push in reversed(pushes(room, max_pages=1)):
        assert not room.complete
        assert room.done(push.key, (100 + push.key.first,))
    assert room.complete
    assert room.all_digests() == (100, 101, 102)


@pytest.mark.parametrize("pages", [(1, 9, 3), ()])
def test_push_from_replaced_pages_is_invalid(pages):
    room = make_room(settled=8)
    (push,) = pushes(room)
    room.req.kv.pages = [*ids(*pages)]
    assert not room.done(push.key, (1, 2))


def test_push_that_outlived_the_requests_kv_is_not_vouched_for():
    room = make_room(settled=8)
    (push,) = pushes(room)
    room.req.kv = None
    assert not room.done(push.key, (1, 2))


# Early pushes: bound to the step that computes the pages


def early(room: SendRoom, stop: int, max_pages: int = 100) -> list[Push]:
    """Start all that goes with a step up to token `stop`."""
    progress, started = KvProgress(ManualClock()), []
    while (push := room.early_push(stop, progress, max_pages)) is not None:
        room.started(push)
        started.append(push)
    return started


def fail_step(room: SendRoom) -> None:
    """As isolation does: the same pages under another identity [history-rebuilt]."""
    room.req.kv = replace(room.req.held_kv)


def finish(room: SendRoom, *started: Push) -> list[bool]:
    return [room.done(push.key, (7,) * push.key.count) for push in started]


def test_pages_that_a_step_fills_go_with_it_and_not_again():
    room = make_room(settled=0)
    (push,) = early(room, 6)
    assert (push.source, push.progress is not None) == (ids(1), True)
    room.req.kv.committed_len = 6
    assert pushes(room) == []


def test_partial_page_goes_with_the_step_that_ends_the_prompt():
    room = make_room(settled=0)
    assert [push.source for push in early(room, 9)] == [ids(1, 2)]
    assert [push.source for push in early(room, 10)] == [ids(3)]


def test_late_grant_includes_earlier_steps_in_next_push():
    room = make_room(settled=4)
    (push,) = early(room, 10)
    assert push.source == ids(1, 2, 3)


def test_pages_are_not_repushed_while_void_push_is_outstanding():  # [late-write]
    room = make_room(settled=4)
    (push,) = early(room, 10)
    fail_step(room)
    assert early(room, 10) == pushes(room) == []
    assert finish(room, push) == [True]
    assert [push.key.first for push in early(room, 10)] == [0]


def test_digests_of_a_void_push_do_not_count():
    room = make_room(settled=4)
    finish(room, *early(room, 10))
    fail_step(room)
    (again,) = early(room, 10)
    assert not room.complete
    room.done(again.key, (1, 2, 3))
    assert room.all_digests() == (1, 2, 3)


def test_step_above_a_failed_one_is_void_too():
    room = make_room(settled=0)
    below, above = *early(room, 4), *early(room, 10)
    assert room.failed(below.key)
    assert finish(room, above) == [True]
    assert room.digests == {}
    assert [push.key.first for push in early(room, 10)] == [0]


def test_committed_pages_stay_pushed_when_later_step_fails():
    room = make_room(settled=4)
    finish(room, *pushes(room))
    finish(room, *early(room, 10))
    fail_step(room)
    assert [push.key.first for push in early(room, 10)] == [1]


def test_failed_push_of_committed_pages_is_not_retried():
    room = make_room(settled=4)
    (push,) = pushes(room)
    assert not room.failed(push.key)


@given(st.data())
def test_each_page_has_digest_of_its_last_computation(data):
    """Computations of a page are numbered; the digest that counts is the number of the last one."""
    room = make_room(settled=0)
    computed = [0, 0, 0]
    under_way: list[Push] = []
    for _ in range(data.draw(st.integers(0, 25))):
        launched = room.req.launched_len
        match data.draw(st.sampled_from(["launch", "settle", "fail", "end", "break"])):
            case "launch" if launched < 10:
                stop = data.draw(st.integers(launched + 1, 10))
                for page in range(launched // 4, -(-stop // 4)):
                    computed[page] += 1
                under_way += early(room, stop)
                room.req.launched_len = stop
            case "settle":
                room.req.held_kv.committed_len = data.draw(st.integers(room.req.held_kv.committed_len, launched))
                under_way += pushes(room)
            case "fail":
                fail_step(room)
                room.req.launched_len = room.req.held_kv.committed_len
            case "end" if under_way:
                push = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
                first = push.key.first
                room.done(push.key, tuple(computed[first : first + push.key.count]))
            case "break" if any(push.progress is not None for push in under_way):
                push = next(push for push in under_way if push.progress is not None)
                under_way.remove(push)
                assert room.failed(push.key)
    if room.req.launched_len < 10:
        for page in range(room.req.launched_len // 4, 3):
            computed[page] += 1
        under_way += early(room, 10)
    room.req.held_kv.committed_len, room.keep_until = 10, 6.0
    under_way += pushes(room)
    while under_way:
        for push in under_way:
            first = push.key.first
            room.done(push.key, tuple(computed[first : first + push.key.count]))
        under_way = pushes(room)
    assert room.complete
    assert room.all_digests() == tuple(computed)
