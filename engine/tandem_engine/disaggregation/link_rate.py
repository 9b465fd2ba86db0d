"""How fast a link is: bytes over seconds of what was written lately.

A self-test sets the figure, pushes of requests keep it current. Both sums fade with what is added to them, by bytes and
by time, so that a fast link is judged by its last tens of MiB and a slow one by its last seconds.
"""

import math
from dataclasses import dataclass

FADE_BYTES = 64 << 20
FADE_S = 2.0
"""After so many further bytes, or so long a time of writing, what was before counts a third."""

LEAST_SHARE = 0.5
"""Of a push's time that is put down to its bytes, however short it was against the latency."""


@dataclass(kw_only=True, slots=True)
class LinkRate:
    """Moving average of one link."""

    latency_s: float = 0.0
    """Of a write of one page; 0 until measured."""
    changed_at: float | None = None
    """Monotonic time of the last figure."""
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 until measured."""
        return self._bytes / self._seconds if self._seconds > 0.0 else 0.0

    def measured(self, *, size: int, seconds: float, latency_s: float, now: float) -> None:
        """A self-test wrote `size` bytes in `seconds`: it replaces what was known."""
        self.latency_s = latency_s
        self._bytes = self._seconds = 0.0
        self.pushed(size=size, seconds=seconds, now=now)

    def pushed(self, *, size: int, seconds: float, now: float) -> None:
        """A push wrote `size` bytes in `seconds`, its latency included."""
        if size <= 0 or not seconds > 0.0:
            return
        writing = max(seconds - self.latency_s, LEAST_SHARE * seconds)
        kept = math.exp(-size / FADE_BYTES - writing / FADE_S)
        self._bytes = kept * self._bytes + size
        self._seconds = kept * self._seconds + writing
        self.changed_at = now
