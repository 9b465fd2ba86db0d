"""The work of a worker: tasks with names, none of which may fail unnoticed."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class NamedTasks:
    """Run until they return, or until `cancel`."""

    failed: Callable[[str], None]
    """Told the name of a task that raised; the error is in the log."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel(self, *, keep: Collection[str]) -> None:
        """End all but those named in `keep`."""
        cancelled = [task for task in self._tasks if task.get_name() not in keep]
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for what is under way. Call at shutdown."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())
            self.failed(task.get_name())
