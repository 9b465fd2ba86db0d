"""How far the reading of weights is, or what follows on it: a bar on a terminal, else a line in the log now and then.

A checkpoint of a hundred gigabytes takes minutes to read, and whoever watches the log of a pod must be able to tell
that from one that hangs. One that is read within `PERIOD_S` leaves a single line.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from tandem_engine.clock import Clock, MonotonicClock

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Seconds between two lines."""
GIB = 1 << 30


@contextmanager
def load_progress(
    total: int, *, shown: bool, doing: str = "loading weights", clock: Clock | None = None
) -> Iterator[Callable[[int], object]]:
    """What to tell the bytes of every tensor that was read, of `total`. Without `shown` nobody is told anything.

    `doing`: what the bar and the lines begin with.
    """
    with tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=None if shown else True) as bar:
        if bar.disable and shown:
            yield _LogLines(total, doing, clock or MonotonicClock()).advance
        else:
            yield bar.update


class _LogLines:
    """One at the beginning, and one in each period in which there is news."""

    def __init__(self, total: int, doing: str, clock: Clock) -> None:
        self._clock = clock
        self._total = total
        self._doing = doing
        self._done = 0
        self._due = clock.now() + PERIOD_S
        logger.info("%s: %.2f GiB", doing, total / GIB)

    def advance(self, done: int) -> None:
        self._done += done
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + PERIOD_S
        share = 100 * self._done // self._total
        logger.info("%s: %.2f of %.2f GiB, %d %%", self._doing, self._done / GIB, self._total / GIB, share)
