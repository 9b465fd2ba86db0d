"""Errors that nobody foresaw, in a thread that goes on all the same."""

import logging
import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tandem_engine.clock import Clock

logger = logging.getLogger(__name__)

AGAIN_AFTER = 1.0
"""Seconds after which the same mishap is logged again. It may happen a thousand times a second."""


@dataclass(kw_only=True, slots=True)
class Mishaps:
    """Counts them, and logs them with their tracebacks. Written by one thread; any may read `count`."""

    clock: Clock
    count: int = 0
    """Since start."""
    _silent_until: dict[str, float] = field(default_factory=dict)

    def attempt(self, during: str, peer: str = "") -> "Attempt":
        """To do something in, which is one of few; `peer` is concerned."""
        return Attempt(mishaps=self, during=during, peer=peer)

    def note(self, error: Exception, during: str, peer: str) -> None:
        self.count += 1
        now = self.clock.now()
        if now >= self._silent_until.get(during, -math.inf):
            self._silent_until[during] = now + AGAIN_AFTER
            whom = f" (peer {peer})" if peer else ""
            logger.error("transfers: unexpected error while %s%s", during, whom, exc_info=error)


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A context that ends like any other whatever is raised in it."""

    mishaps: Mishaps
    during: str
    peer: str
    failed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        self.mishaps.note(error, self.during, self.peer)
        return True
