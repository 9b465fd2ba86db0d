"""The work of a worker: none of it fails unnoticed, and no task that is to continue is ended."""

import asyncio
import logging

from tandem_services.worker.service import NamedTasks


async def test_task_that_raises_is_named_and_its_error_logged(caplog):
    failed: list[str] = []
    tasks = NamedTasks(failed=failed.append)

    async def fail() -> None:
        raise ValueError("of no use")

    with caplog.at_level(logging.ERROR):
        tasks.start(fail(), "feed")
        await tasks.settle()
    assert failed == ["feed"]
    assert "task feed failed" in caplog.text
    assert "of no use" in caplog.text


async def test_cancelling_ends_all_but_kept_tasks_without_failure():
    failed: list[str] = []
    ended: list[str] = []
    tasks = NamedTasks(failed=failed.append)
    go = asyncio.Event()

    async def work(name: str) -> None:
        try:
            await go.wait()
        finally:
            ended.append(name)

    for name in ("health", "feed"):
        tasks.start(work(name), name)
    await asyncio.sleep(0)
    await tasks.cancel(keep={"health"})
    assert ended == ["feed"]
    go.set()
    await tasks.settle()
    assert ended == ["feed", "health"]
    assert failed == []
