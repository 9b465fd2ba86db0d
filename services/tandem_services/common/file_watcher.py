"""Reloads the content of files when they change: keys and models.

1. The content must be valid at start; the component that starts the gateway checks that.
2. Names and modification times are checked once per second. Changed files are read off the event loop, then applied.
3. A change that is invalid or cannot be applied leaves everything as it was. It is reported once, and tried again every
   second until it is corrected or undone.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tandem_services.common.tasks import run_periodically

POLL_S = 1.0
Signature = tuple[tuple[str, int, int, int], ...]
T = TypeVar("T")


def signature_of(files: Iterable[Path]) -> Signature:
    """Differs when one of them may have changed. Raises `OSError`."""
    stats = [(file, file.stat()) for file in files]
    return tuple((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@dataclass(kw_only=True, slots=True)
class Follower(Generic[T]):
    """One per file or folder."""

    value: T
    """What is used."""
    signature: Callable[[], Signature]
    """Of the files; () when they cannot be looked at."""
    read: Callable[[], T]
    take: Callable[[T], Awaitable[None]]
    """Use another value from now on, or raise and continue with the former."""
    refused: Callable[[str], None]
    """Called once for each error."""
    mended: Callable[[], None]
    """The files say again what is used."""
    faults: tuple[type[Exception], ...]
    """What `read` and `take` may raise; the message is the error."""
    seen: Signature | None = None
    """None: nothing has been looked at."""
    _last_error: str = ""

    async def run(self, logger: logging.Logger, *, what: str) -> None:
        """Runs until canceled. `what` is followed, in the words of a log line."""
        # A file that is no longer followed would keep withdrawn content active.
        await run_periodically(self.poll, every_s=POLL_S, logger=logger, failure=f"cannot check for changed {what}")

    async def poll(self) -> None:
        """Take over what has changed."""
        signature = await asyncio.to_thread(self.signature)
        if signature == self.seen and not self._last_error:
            return
        try:
            value = await asyncio.to_thread(self.read)
            if value != self.value:
                await self.take(value)
                self.value, self._last_error = value, ""
        except self.faults as error:
            self._refuse(str(error))
            return
        self.seen = signature
        if self._last_error:
            self._last_error = ""
            self.mended()

    def _refuse(self, failure: str) -> None:
        if failure != self._last_error:
            self._last_error = failure
            self.refused(failure)
