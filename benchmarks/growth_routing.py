"""What routing costs, by workers and by blocks in the index. Not a command: see `cost_growth.py`."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from gateway_peers import measure as measure_gateway
from gateway_systems import Case as Load
from gateway_systems import tandem
from growth_fit import Curve
from pinned_processes import OTHER_CORES
from router_redis import PAGE, SLICE, Bench, Case, index_bytes, local_us, measure, redis_us, views

from tandem_services.router.index import IndexUpdate, UpdateKind
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.views.fleet_reader import FleetReader
from tandem_testing.redis_server import RedisServer
from tandem_testing.service_clock import ServiceClock

PROMPT = 32_768
"""Tokens of a prompt that is routed."""
HOLDERS = 8
"""Workers that share the blocks of an index."""
MIB_PER_MILLION = 100
"""Of Redis's memory, more than a million blocks take."""


GATEWAY_FLEET = 1024
"""Workers that many gateways see."""
VIEW_SECONDS = 16
DECISIONS = 16
"""Of each gateway, all gateways at once."""

ALL_ROWS = "all rows are read into one table of Lua, in one piece; memory of that size costs more than its share"
ALL_ROWS_POWER = 1.25


def worker_curves(deciding: Sequence[int], serving: Sequence[int], *, requests: int, rounds: int) -> dict[str, Curve]:
    """CPU of a decision among `deciding` workers, and of a whole request with `serving` ones: microseconds."""
    redis, local, gateway = {}, {}, {}
    with closing_redis() as server:
        for count in deciding:
            case = Case(workers=count, tokens=PROMPT, state="shared")
            redis[count] = float(str(asyncio.run(measure(server, case, calls=200, rounds=rounds))["redis_us"]))
            local[count] = local_us(count, 1000)["p50_us"]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, OTHER_CORES)
    try:
        for count in serving:
            options = argparse.Namespace(workers=count)
            load = Load(clients=16, requests=requests, tokens=1, stream=False)
            each = [measure_gateway(tandem, load, options)["us_per_request"] for _ in range(rounds)]
            gateway[count] = median(each)
    finally:
        os.sched_setaffinity(0, cores)
    return {
        "decision in Redis by workers": Curve(points=redis, unit="µs"),
        "decision without Redis by workers": Curve(points=local, unit="µs"),
        "request through the gateway by workers": Curve(points=gateway, unit="µs"),
    }


def view_curves(workers: Sequence[int], *, rounds: int) -> dict[str, Curve]:
    """CPU of Redis for what workers and gateways do every second, by workers: microseconds."""
    found = {}
    with closing_redis() as server:
        for count in workers:
            found[count] = asyncio.run(views(server, count, rounds=rounds))

    def curve(name: str, reason: str = "") -> Curve:
        points = {count: each.costs[name]["cpu_us"] for count, each in found.items()}
        return Curve(points=points, unit="µs", reason=reason, reason_power=ALL_ROWS_POWER if reason else 1.0)

    return {
        "heartbeat by workers": curve("heartbeat"),
        "view of a gateway by workers": curve("view_per_gateway_second"),
        "summary of a cell by workers": curve("summary"),
        "first view of a gateway by workers": curve("first_view", ALL_ROWS),
        "sweep by workers": curve("sweep", ALL_ROWS),
    }


def gateway_curves(gateways: Sequence[int], *, rounds: int) -> dict[str, Curve]:
    """CPU of Redis by gateways of one fleet: for a second of the views of all, and for one of their decisions."""
    with closing_redis() as server:
        views_us, decision_us = asyncio.run(_by_gateways(server, gateways, rounds))
    return {
        "views of all gateways by gateways": Curve(points=views_us, unit="µs"),
        "decision by gateways": Curve(points=decision_us, unit="µs"),
    }


async def _by_gateways(
    server: RedisServer, gateways: Sequence[int], rounds: int
) -> tuple[dict[int, float], dict[int, float]]:
    benches = [Bench(server, GATEWAY_FLEET if number == 0 else 0) for number in range(max(gateways))]
    chain = [os.urandom(16) for _ in range(1024 // PAGE)]
    await benches[0].fill("shared", chain)
    await benches[0].heartbeats()
    clock = ServiceClock()
    readers = [FleetReader(registry=bench.registry, clock=clock) for bench in benches]
    for reader in readers:
        await reader.snapshot()

    async def redis_us(work: Callable[[int], Awaitable[object]], count: int) -> float:
        found = []
        for _ in range(rounds):
            before = await benches[0].redis_cpu_s()
            await asyncio.gather(*(work(number) for number in range(count)))
            found.append((await benches[0].redis_cpu_s() - before) * 1e6)
        return min(found)

    async def seconds(number: int) -> None:
        for _ in range(VIEW_SECONDS):
            clock.advance(HEARTBEAT_S / len(readers))
            await readers[number].snapshot()

    async def decisions(number: int) -> None:
        for _ in range(DECISIONS):
            await benches[number].decide(b"".join(chain), 1024)

    try:
        viewed = {count: await redis_us(seconds, count) / VIEW_SECONDS for count in gateways}
        decided = {count: await redis_us(decisions, count) / (DECISIONS * count) for count in gateways}
    finally:
        for bench in benches:
            await bench.client.close()
    return viewed, decided


def block_curves(blocks: Sequence[int], *, rounds: int) -> tuple[dict[str, Curve], dict[int, str]]:
    """Redis's memory and its time for a decision, by blocks in the index; and what does not fit here, and why."""
    fits = {count: _lacking(count) for count in blocks}
    taken, times = {}, {}
    for count in blocks:
        if not fits[count]:
            taken[count], times[count] = asyncio.run(_filled(count, rounds))
    curves = {
        "memory of the index by blocks": Curve(points=taken, unit="MiB"),
        "decision in Redis by blocks": Curve(points=times, unit="µs"),
    }
    return curves, {count: why for count, why in fits.items() if why}


def _lacking(blocks: int) -> str:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, needed = int(fields["MemAvailable"].split()[0]) >> 10, 2 * blocks * MIB_PER_MILLION // 10**6
    return "" if needed <= available else f"needs {needed} MiB of memory, {available} are free"


async def _filled(blocks: int, rounds: int) -> tuple[float, float]:
    """MiB that `blocks` take, and µs of Redis per decision with so many in the index."""
    # Emptying a Redis of ten million blocks takes longer than stopping it.
    with closing_redis() as server:
        mib = (await index_bytes(server, blocks))["mib_per_million_blocks"] * blocks / 1e6
    with closing_redis() as server:
        return mib, await _decision_us(server, blocks, rounds)


@contextmanager
def closing_redis() -> Iterator[RedisServer]:
    server = RedisServer.start()
    try:
        yield server
    finally:
        server.stop()


async def _decision_us(server: RedisServer, blocks: int, rounds: int) -> float:
    bench = Bench(server, HOLDERS)
    chain = [os.urandom(16) for _ in range(PROMPT // PAGE)]
    await bench.fill("shared", chain)
    for each in bench.records:
        for number in range(blocks // HOLDERS // SLICE):
            stored = IndexUpdate(UpdateKind.STORED, tuple(os.urandom(16) for _ in range(SLICE)))
            await bench.index.apply(
                each.view.incarnation, [stored], page_size=PAGE, builds_on=1 + number, revision=2 + number
            )
    await bench.heartbeats()
    try:
        await redis_us(bench, b"".join(chain), PROMPT, 1, 20)
        return median([await redis_us(bench, b"".join(chain), PROMPT, 1, 300) for _ in range(rounds)])
    finally:
        await bench.client.close()
