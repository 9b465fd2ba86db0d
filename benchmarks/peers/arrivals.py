"""Steady arrivals at shares of what a server can do at most: time to the first token and between tokens.

A server's capacity is what it does in this run with all requests waiting; each then gets Poisson arrivals at 30, 60 and
90 % of its own. So a table of these figures says how latency grows with load on each, at the rates it names.
"""

import asyncio
import random
import time
from collections.abc import Sequence

import msgspec

from peers.engines.base import ServerEngine
from peers.jobs import Job, mixed
from peers.machine import Watch, wait_until_idle
from peers.percentiles import percentile
from peers.streams import Stream, complete, complete_all

SHARES = (0.3, 0.6, 0.9)


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


def jobs(count: int, number: int) -> list[Job]:
    return mixed("arrivals", number, count=count, prompt=(64, 512), output=(32, 64))


def capacity(engine: ServerEngine, count: int) -> float:
    """Requests a second with all of them waiting."""
    seconds, streams = complete_all(engine.port, engine.model, jobs(count, 0))
    return len(streams) / seconds


def at_shares(engine: ServerEngine, *, model: str, dtype: str, count: int) -> list[Load]:
    engine.resume()
    capacity(engine, count // 2)  # warm
    most = capacity(engine, count)
    loads = []
    for number, share in enumerate(SHARES, 1):
        wait_until_idle()
        with Watch(engine.pids) as watch:
            streams = asyncio.run(_arrive(engine, jobs(count, number), rate=share * most))
        loads.append(_load(engine, model, dtype, share, share * most, streams, watch.others))
    engine.pause()
    return loads


async def _arrive(engine: ServerEngine, waiting: Sequence[Job], *, rate: float) -> list[Stream]:
    """Poisson arrivals, the same for every engine but for the rate."""
    rng = random.Random(len(waiting))
    began, at = time.perf_counter(), 0.0
    running = []
    for job in waiting:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        running.append(asyncio.create_task(complete(engine.port, engine.model, job)))
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*running))


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
