"""Steady arrivals at shares of what a server can do at most: time to the first token and between tokens.

A server's capacity is what it does in this run with all requests waiting; each then gets Poisson arrivals at 30, 60 and
90 % of its own. So a table of these figures says how latency grows with load on each, at the rates it names.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from peers.engines.base import ServerEngine
from peers.jobs import Job, mixed
from peers.machine import Watch, wait_until_idle
from peers.percentiles import percentile
from peers.streams import Stream, all_within, complete, complete_all

SHARES = (0.3, 0.6, 0.9)
WARM_UP = -1
"""A round whose prompts no other has."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one rate."""

    engine: str
    model: str
    dtype: str
    share: float
    """Of its capacity."""
    rate: float
    """Requests a second."""
    requests: int
    ttft_ms: dict[str, float]
    """p50, p99."""
    itl_ms: dict[str, float]
    others: float
    stage: str = ""


def jobs(count: int, number: int) -> list[Job]:
    return mixed("arrivals", number, count=count, prompt=(64, 512), output=(32, 64))


def capacity(engine: ServerEngine, waiting: Sequence[Job]) -> float:
    """Requests a second with all of them waiting."""
    seconds, streams = complete_all(engine.port, engine.model, waiting, limit_s=engine.deadline.wait_s())
    return len(streams) / seconds


def at_shares(engine: ServerEngine, *, model: str, dtype: str, count: int) -> Iterator[Load]:
    """One after the other. Raises `PeerError`."""
    engine.resume()
    capacity(engine, jobs(count // 2, WARM_UP))
    most = capacity(engine, jobs(count, 0))
    for number, share in enumerate(SHARES, 1):
        wait_until_idle()
        with Watch(engine.pids) as watch:
            streams = asyncio.run(_arrive(engine, jobs(count, number), rate=share * most))
        yield _load(engine, model, dtype, share, share * most, streams, watch.others)
    engine.pause()


async def _arrive(engine: ServerEngine, waiting: Sequence[Job], *, rate: float) -> list[Stream]:
    """Poisson arrivals, the same for every engine but for the rate."""
    rng = random.Random(len(waiting))
    arriving = accumulate((rng.expovariate(rate) for _ in waiting[1:]), initial=0.0)
    began = time.perf_counter()

    async def arrive(job: Job, at: float) -> Stream:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await complete(engine.port, engine.model, job)

    both = zip(waiting, arriving, strict=True)
    return await all_within(engine.deadline.wait_s(), (arrive(job, at) for job, at in both))


def _load(
    engine: ServerEngine, model: str, dtype: str, share: float, rate: float, streams: Sequence[Stream], others: float
) -> Load:
    first = [stream.ttft * 1e3 for stream in streams]
    gaps = [gap * 1e3 for stream in streams for gap in stream.gaps]
    return Load(
        engine=engine.name,
        model=model,
        dtype=dtype,
        share=share,
        rate=rate,
        requests=len(streams),
        ttft_ms={"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        itl_ms={"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)},
        others=others,
    )
