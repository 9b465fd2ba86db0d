"""How long the device takes for a call: median of many, each with cold caches, measured by the device's own events.

Caches are made cold by reading, for what was written would have to leave them at the expense of the call. And reading
takes longer than the host does to queue a call, so that the device never waits for it between the two events.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

FLUSH_BYTES = 1 << 30
"""Many times what any device's last cache holds, so that the host has queued the call before they are read."""
WARM_UP = 3
MAX_S = 0.5
"""Of all repetitions of one call; a few are measured in any case."""
FEWEST, MOST = 5, 100


class Timing(NamedTuple):
    """Of one call."""

    seconds: float
    """The median."""
    spread: float
    """From the first to the last quarter, as a fraction of the median."""


class Stopwatch:
    """Measures on one device. On a CPU, to try the programs, by the clock on the wall."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timed = self._by_events if device.type == "cuda" else self._by_clock
        self._other = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 1, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median alone."""
        return self.timing(call).seconds

    def timing(self, call: Callable[[], object]) -> Timing:
        """Of single calls. What `call` allocates is given back before the next one."""
        for _ in range(WARM_UP):
            self._timed(call)
        one = max(self._timed(call), 1e-7)
        rounds = max(FEWEST, min(MOST, int(MAX_S / one)))
        times = [self._timed(call) for _ in range(rounds)]
        first, median, third = statistics.quantiles(times, n=4)
        return Timing(median, (third - first) / max(median, 1e-9))

    def _by_events(self, call: Callable[[], object]) -> float:
        self._other.amax()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _by_clock(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
