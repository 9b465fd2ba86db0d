"""Background tasks of an event loop: work that no request waits for, periodic work, and signals that end a process."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class BackgroundTasks:
    """Work that no request waits for. asyncio alone would drop a running task without references."""

    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for what is under way. Call at shutdown."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def run_periodically(
    step: Callable[[], Awaitable[None]],
    *,
    every_s: float | Callable[[], float],
    logger: logging.Logger,
    failure: str,
    at_once: bool = False,
) -> None:
    """Do `step` every `every_s` seconds, `at_once` for the first time, or after so long. A function is asked each time.

    A task boundary: a failing step is logged as `failure` and repeated, for its users would not notice
    that it has stopped.
    """
    wait_s = every_s if callable(every_s) else lambda: every_s
    if not at_once:
        await asyncio.sleep(wait_s())
    while True:
        try:
            await step()
        except Exception:
            logger.exception(failure)
        await asyncio.sleep(wait_s())


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGINT and SIGHUP unless they are ignored.

    What `nohup` starts is to outlive its terminal, and Ctrl-C is not for what a script starts with `&`.
    """
    optional = (signal.SIGINT, signal.SIGHUP)
    return (signal.SIGTERM, *(number for number in optional if signal.getsignal(number) is not signal.SIG_IGN))
