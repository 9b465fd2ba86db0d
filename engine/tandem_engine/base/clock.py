"""Time as a dependency, so that deadlines are tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Never compared across processes [one-clock]."""

    def now(self) -> float: ...


class MonotonicClock:
    """The process's own monotonic clock."""

    now = staticmethod(time.monotonic)
    """Itself: a request asks for the time often."""
