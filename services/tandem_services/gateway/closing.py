"""The end of what still runs when a gateway has waited long enough: each request gets its error.

1. running  an answer registers its task for as long as it is being made
2. ended    `end` cancels these tasks. The cancellation becomes an `ApiError` where the answer was registered, so a
            stream writes the error as its last event, and an answer that has not begun is a 503
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem_services.common.errors import ApiError, unavailable

RETRY_S = 1.0


@dataclass(slots=True)
class Closing:
    """One per gateway; belongs to its event loop."""

    ended: bool = False
    _tasks: "set[asyncio.Task[object]]" = field(default_factory=set)
    _cancelled: "frozenset[asyncio.Task[object]]" = frozenset()

    def end(self) -> None:
        """End every answer that is being made, and each that begins later. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._cancelled = frozenset(self._tasks)
        for task in self._cancelled:
            task.cancel()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The current task makes an answer while the block lasts. Raises `ApiError` 503 where `end` ends it."""
        if self.ended:
            raise shutting_down()
        task = asyncio.current_task()
        assert task is not None, "an answer is made by a task"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Not where the client has left as well.
            if task not in self._cancelled or task.uncancel():
                raise
            raise shutting_down() from None
        finally:
            self._tasks.discard(task)


def shutting_down() -> ApiError:
    return unavailable("The gateway is shutting down. Send the request again.", retry_after=RETRY_S)
