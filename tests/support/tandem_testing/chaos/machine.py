"""How much slower than promised this machine may be.

Promises of recovery are made for a machine on which every worker has a core of its own. Recovery is noticing, which
takes no processor, and computing (prompts are prefilled again), which on fewer cores, or beside other programs, takes
longer by

    slowness = max(1, workers / cores) * contention

Of a bound, at most `COMPUTING_S` are computing. While a scenario runs, a small probe beside it measures how long work
takes on its wall in the same way; its worst figure, which includes the fleet's own load, is the slowness where it is
greater.

`contention` is measured before every scenario: a second's worth of work spread over all cores, its time on the
wall divided by its time on a processor. 1 on an idle machine; the fleet is idle when it is measured. Where a recovery
is late by that measure it is taken again, and the worse one counts: other programs may have started by then.
A recovery is in time when it is below `bound + (slowness - 1) * min(bound, COMPUTING_S) + quiet`, with `quiet` the
longest silence of the same kind of load without any fault (scenario 0). Where a recovery is late by that, too, the very
load of the slowest stream comes again without a fault, and `quiet` is the longest silence of that, if it is longer.
Reports always show the measured seconds, the bare bound and what is allowed here.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

WORK_S = 0.3
COMPUTING_S = 1.5
"""What prompts of the suite take to be computed again while every other stream continues, and then some."""
BESIDE_S = 0.02
"""Processor time of one measurement beside a scenario: one a second takes a fiftieth of one core."""
BESIDE = f"""
import time
while True:
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < {BESIDE_S}:
        pass
    print((time.perf_counter() - wall) / (time.process_time() - cpu), flush=True)
    time.sleep(1)
"""
PROBE = f"""
import time
wall, cpu = time.perf_counter(), time.process_time()
while time.process_time() - cpu < {WORK_S}:
    pass
print((time.perf_counter() - wall) / (time.process_time() - cpu))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowness:
    """What stretches the bounds of one scenario."""

    cores: int
    workers: int
    contention: float
    quiet_s: float = 0.0
    during: float = 1.0
    """Wall over processor time of the probe that ran beside the scenario, at its worst."""

    @property
    def factor(self) -> float:
        return max(max(1.0, self.workers / self.cores) * max(1.0, self.contention), self.during)

    def allowed(self, bound_s: float) -> float:
        """Seconds that a recovery promised within `bound_s` may take here."""
        return bound_s + (self.factor - 1.0) * min(bound_s, COMPUTING_S) + self.quiet_s


def worse(one: Slowness, other: Slowness) -> Slowness:
    return max(one, other, key=lambda slowness: slowness.factor)


async def measure(workers: int, quiet_s: float) -> Slowness:
    cores = len(os.sched_getaffinity(0))
    contention = await asyncio.gather(*(_probe() for _ in range(cores)))
    return Slowness(cores=cores, workers=workers, contention=max(contention), quiet_s=quiet_s)


@dataclass(slots=True)
class Worst:
    """What `beside` has measured so far."""

    contention: float = 1.0


@asynccontextmanager
async def beside(worst: Worst) -> AsyncIterator[None]:
    """Measures while the body runs, and keeps the greatest figure in `worst`. A figure is the mean of three in a row:
    one alone may be a single time slice."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", BESIDE, stdout=asyncio.subprocess.PIPE)
    reading = asyncio.ensure_future(_read(process, worst))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # Ctrl-C ends it, too
            process.kill()
        await process.wait()
        await reading


async def _read(process: asyncio.subprocess.Process, worst: Worst) -> None:
    assert process.stdout is not None
    latest: deque[float] = deque(maxlen=3)
    while line := await process.stdout.readline():
        latest.append(float(line))
        if len(latest) == latest.maxlen:
            worst.contention = max(worst.contention, sum(latest) / len(latest))


async def _probe() -> float:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROBE, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return float(out)
