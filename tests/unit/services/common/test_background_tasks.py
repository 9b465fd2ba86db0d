"""Background tasks: none is lost, and one failure does not end a periodic task."""

import asyncio
import logging

import pytest

from tandem_services.common.tasks import BackgroundTasks, run_periodically

logger = logging.getLogger(__name__)


async def test_started_tasks_finish_before_the_end():
    tasks, done, go = BackgroundTasks(), [], asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.append("work")

    tasks.start(work())
    settled = asyncio.ensure_future(tasks.settle())
    await asyncio.sleep(0)
    assert not settled.done()
    go.set()
    await settled
    assert done == ["work"]


async def test_failed_task_does_not_keep_the_others_from_settling():
    tasks, done = BackgroundTasks(), []

    async def fail() -> None:
        raise ValueError("of no use")

    async def work() -> None:
        done.append("work")

    tasks.start(fail())
    tasks.start(work())
    await tasks.settle()
    assert done == ["work"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_step_that_raises_is_logged_and_done_again(at_once, caplog):
    turns, enough = [], asyncio.Event()

    async def step() -> None:
        turns.append(len(turns))
        if len(turns) == 1:
            raise ValueError("only once")
        if len(turns) == 3:
            enough.set()

    task = asyncio.ensure_future(run_periodically(step, every_s=0, logger=logger, failure="it failed", at_once=at_once))
    await enough.wait()
    task.cancel()
    assert [record.message for record in caplog.records] == ["it failed"]
    assert "only once" in str(caplog.records[0].exc_info)


async def test_first_step_waits_unless_it_is_wanted_at_once():
    turns = []

    async def step() -> None:
        turns.append("turn")

    later = asyncio.ensure_future(run_periodically(step, every_s=3600, logger=logger, failure=""))
    await asyncio.sleep(0)
    assert turns == []
    now = asyncio.ensure_future(run_periodically(step, every_s=3600, logger=logger, failure="", at_once=True))
    await asyncio.sleep(0)
    assert turns == ["turn"]
    for task in (later, now):
        task.cancel()
