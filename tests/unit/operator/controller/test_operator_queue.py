"""The queue: each service once at a time, bursts as one look, failures later and later."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.controller.workqueue import FIRST_PAUSE_S, MAX_PAUSE_S, Schedule, WorkQueue, back_off


def test_burst_of_events_of_one_service_is_one_reconcile():
    schedule: Schedule[str] = Schedule()
    for _ in range(100):
        schedule.add("chat", 0.0)
    assert schedule.take(0.0) == "chat"
    assert schedule.take(0.0) is None


def test_event_during_reconcile_queues_exactly_one_more():
    schedule: Schedule[str] = Schedule()
    schedule.add("chat", 0.0)
    schedule.take(0.0)
    schedule.add("chat", 1.0)
    schedule.add("chat", 1.0)
    assert schedule.take(2.0) is None
    schedule.done("chat")
    assert schedule.take(2.0) == "chat"
    schedule.done("chat")
    assert schedule.take(2.0) is None


def test_earlier_due_time_replaces_later_one():
    schedule: Schedule[str] = Schedule()
    schedule.add("chat", 60.0)
    schedule.add("chat", 5.0)
    schedule.add("chat", 30.0)
    assert (schedule.take(4.9), schedule.next_at()) == (None, 5.0)
    assert schedule.take(5.0) == "chat"
    schedule.done("chat")
    assert (schedule.next_at(), len(schedule)) == (None, 0)


def test_failure_backoff_grows_and_resets_on_success():
    schedule: Schedule[str] = Schedule()
    pauses = []
    now = 0.0
    for _ in range(12):
        schedule.add("chat", now)
        assert schedule.take(now) == "chat"
        pauses.append(schedule.failed("chat", now))
        now += 1000.0
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S
    assert MAX_PAUSE_S / 2 <= pauses[-1] <= MAX_PAUSE_S
    schedule.take(now)
    schedule.done("chat")
    schedule.add("chat", now)
    schedule.take(now)
    assert schedule.failed("chat", now) <= FIRST_PAUSE_S


def test_own_write_events_do_not_hurry_a_failed_reconcile():
    schedule: Schedule[str] = Schedule()
    schedule.add("chat", 0.0)
    schedule.take(0.0)
    schedule.add("chat", 0.0)
    pause = schedule.failed("chat", 0.0)
    assert schedule.take(0.0) is None
    assert schedule.take(pause) == "chat"


@given(st.integers(1, 10_000))
def test_pauses_are_bounded_however_often_it_failed(failures):
    assert FIRST_PAUSE_S / 2 <= back_off(failures) <= MAX_PAUSE_S


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done", "failed"])), max_size=60))
def test_queue_never_overlaps_or_forgets_a_service(moves):
    schedule: Schedule[str] = Schedule()
    wanted, working = set(), set()
    now = 0.0
    for key, move in moves:
        now += 1.0
        if move == "add":
            schedule.add(key, now)
            wanted.add(key)
        elif move == "take":
            got = schedule.take(now)
            if got is not None:
                assert got not in working
                assert got in wanted
                working.add(got)
                wanted.discard(got)
        elif key in working:
            working.discard(key)
            if move == "done":
                schedule.done(key)
            else:
                schedule.failed(key, now)
                wanted.add(key)
    for key in working:
        schedule.done(key)
    left = set()
    while (key := schedule.take(now + MAX_PAUSE_S)) is not None:
        left.add(key)
        schedule.done(key)
    assert left == wanted


async def test_waiting_worker_wakes_for_what_is_added():
    queue: WorkQueue[str] = WorkQueue()
    worker = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("later", after_s=3600.0)
    await asyncio.sleep(0)
    queue.add("chat")
    assert await worker == "chat"
    queue.done("chat")
