"""What the control plane is to reach in large fleets, figure by figure. Not a command: see `router_redis.py --targets`.

    decisions   Redis's time for a decision by workers, over that of 64; with notes of prompts in flight over without;
                `--base`: that of another commit over that of now, at 1,024 workers
    views       Redis's time for a heartbeat and for a gateway's view each second, by workers
    index       Redis's memory for a token in the index
    local       a decision without Redis, by workers
    candidates  few candidates over all workers: hit rate and time to the first token, in the simulator
    cells       four cells of 16 workers over one of 64
    peers       equal prompts in flight: with notes over without, and over sglang-router
    large       10,000 workers in 20 cells: minutes of this machine, and CPU of Redis for a second of a cell

The last four need `--trace`, and `peers` an environment with sglang-router. All are ratios within one run, but for
times that say so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from gateway_mock import checkout_of
from peers.report import targets_table
from peers.targets import Target
from router_redis import PAGE, Case, index_bytes, local_us, measure, views
from routing_peers import doubled, run_all

from tandem_lab.simulate.clock import NO_NOTES, PRICE_ALL
from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.gateway import GatewayShape
from tandem_lab.simulate.replay import replay
from tandem_lab.simulate.report import PolicyReport, policy_report
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests
from tandem_lab.simulate.run import Simulation, distinct_blocks
from tandem_lab.traces import TRACE_BLOCK, TraceRow, read_trace
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.policies import PolicyNames
from tandem_testing.redis_server import RedisServer

FLEETS = (64, 1024, 10_000)
PROMPT = 1024
STATES = {"cold": "nothing cached", "shared": "a quarter shared", "ragged": "a different share per worker"}
SIMULATED = {"workers": 64, "cache_share": 0.4}

LOCALITY = PolicyNames.parse("locality")


async def decisions(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    async def us(workers: int, state: str, **constants: float) -> float:
        case = Case(workers=workers, tokens=PROMPT, state=state, constants=constants)
        return float(str((await measure(server, case, calls=options.calls, rounds=options.rounds))["redis_us"]))

    found = {(workers, state): await us(workers, state) for workers in FLEETS for state in STATES}
    rows = []
    for workers, most in ((1024, 1.6), (10_000, 2.5)):
        rows += [
            at_most(f"decision, {workers:,} workers over 64, {name}", found[workers, state] / found[64, state], most)
            for state, name in STATES.items()
        ]
    without = await us(64, "ragged", **NO_NOTES)
    rows.append(at_most("decision, with notes of prompts in flight over without", found[64, "ragged"] / without, 1.2))
    before = None if options.base is None else earlier_us(options)
    for state, name in STATES.items():
        ratio = None if before is None else before[state] / found[1024, state]
        title = f"decision at 1,024 workers, before over now, {name}"
        rows.append(Target(name=title, ratio=ratio, target=5.0, reason="name an earlier commit with --base"))
    return rows


def earlier_us(options: argparse.Namespace) -> dict[str, float]:
    """Of another checkout or commit, at 1,024 workers, by its own benchmark."""
    with checkout_of(options.base) as checkout, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        flags = ["--workers", "1024", "--tokens", str(PROMPT), "--blocks", "1000", "--out", str(out)]
        flags += ["--calls", str(options.calls), "--rounds", str(options.rounds)]
        parts = ("engine", "services", "lab", "tests/support", "benchmarks")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / part) for part in parts)}
        command = [sys.executable, str(checkout / "benchmarks" / "router_redis.py"), *flags]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return {case["cache"]: case["redis_us"] for case in json.loads(out.read_text())["cases"]}


async def fleet_views(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    rows = []
    for workers in FLEETS:
        costs = {
            name: curve["cpu_us"] for name, curve in (await views(server, workers, rounds=options.rounds)).costs.items()
        }
        where = f"at {workers:,} workers"
        over_empty = costs["heartbeat"] / costs["empty_call"]
        rows.append(at_most(f"heartbeat {where}, over a call that does nothing", over_empty, 2.5))
        rows.append(at_most(f"heartbeat {where}, µs", costs["heartbeat"], 30.0))
        if workers == 1024:
            view = costs["view_per_gateway_second"]
            whole = costs["whole_view"] / view
            rows.append(at_least(f"a gateway's view {where}, all described over now", whole, 150.0))
            rows.append(at_most(f"a gateway's view {where}, ms for each second", view / 1e3, 0.15))
    return rows


async def index(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    del options
    mib = (await index_bytes(server, 100_000))["mib_per_million_blocks"]
    return [at_most("index, bytes per token", mib * 2**20 / 1e6 / PAGE, 0.15)]


async def local(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    del server, options
    us = {workers: local_us(workers, 1000)["p50_us"] for workers in FLEETS}
    return [
        at_most("decision without Redis, 1,024 workers, µs", us[1024], 200.0),
        at_most("decision without Redis, 10,000 workers over 64", us[10_000] / us[64], 1.5),
    ]


def rows_of(options: argparse.Namespace, count: int, *, speed: float, twice: bool) -> list[SimulatedRequest]:
    """The first requests of the trace, those of a conversation to one gateway. `twice`: each again within two
    seconds."""
    rows: Iterable[TraceRow] = islice(read_trace(options.trace), count)
    if twice:
        rows = doubled(rows, speed=speed, seed=0)
    return simulated_requests(rows, limit=None, speed=speed, sessions_apart=True)


async def simulated(
    server: RedisServer,
    requests: Sequence[SimulatedRequest],
    *,
    workers: int,
    cache_share: float = 0.0,
    cache_blocks: int = 0,
    gateways: int = 1,
    cells: int = 1,
    constants: Mapping[str, float] | None = None,
    seed: int = 0,
) -> PolicyReport:
    """Of `locality`."""
    server.command("FLUSHALL")
    each = cache_blocks or int(distinct_blocks(requests) * cache_share) // workers
    shape = FleetShape(both=workers, cache_blocks=each, block_tokens=TRACE_BLOCK)
    outcome = await replay(
        requests,
        shape,
        redis=RedisAddress(url=server.url),
        cluster="targets",
        policies=LOCALITY,
        local_prefill_tokens=2048,
        seed=seed,
        on_served=lambda: None,
        gateways=GatewayShape(gateways=gateways),
        constants=constants or {},
        cells=cells,
    )
    limits = Simulation(requests=requests, shape=shape, policies={}, local_prefill_tokens=0, seed=0).limits()
    return policy_report(outcome, pooled=limits.pooled_lru_hit_rate, slo=None, cells=cells)


def hit_and_ttft(name: str, one: PolicyReport, other: PolicyReport, *, hit: float, ttft: float) -> list[Target]:
    """`one` over `other`."""
    assert one.ttft_ms is not None
    assert other.ttft_ms is not None
    return [
        at_least(f"{name}: hit rate", one.block_hit_rate / other.block_hit_rate, hit),
        at_most(f"{name}: mean time to first token", one.ttft_ms.mean / other.ttft_ms.mean, ttft),
    ]


TWICE = (("", 2500, 4.0, False), (", each prompt twice", 2500, 2.0, True))
"""Name, requests, speed: as busy with each prompt twice."""


async def candidates(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    rows = []
    for name, count, speed, twice in TWICE:
        requests = rows_of(options, count, speed=speed, twice=twice)
        few, all_ = [
            await simulated(server, requests, **SIMULATED, constants=constants) for constants in ({}, PRICE_ALL)
        ]
        rows += hit_and_ttft(f"few candidates over all of 64{name}", few, all_, hit=0.985, ttft=1.02)
    return rows


async def cells(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    rows = []
    for name, count, speed, twice in TWICE:
        requests = rows_of(options, count, speed=speed, twice=twice)
        one, four = [await simulated(server, requests, **SIMULATED, gateways=4, cells=number) for number in (1, 4)]
        rows += hit_and_ttft(f"four cells of 16 over one of 64{name}", four, one, hit=0.97, ttft=1.06)
    return rows


async def peers(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    asked = {"workers": 8, "cache_share": 0.1, "num_prompts": 2500, "speed": 0.55, "doubled": True, "seed": 0}
    server.command("FLUSHALL")
    found = await run_all(
        argparse.Namespace(trace=options.trace, peers_venv=options.peers_venv, **asked), RedisAddress(url=server.url)
    )
    reports = msgspec.convert(found["policies"], dict[str, PolicyReport])
    requests = rows_of(options, 2500, speed=0.55, twice=True)
    without = await simulated(server, requests, workers=8, cache_share=0.1, constants=NO_NOTES)
    plain = rows_of(options, 2500, speed=1.0, twice=False)
    as_it_is = [
        await simulated(server, plain, workers=8, cache_share=0.1, constants=constants) for constants in ({}, NO_NOTES)
    ]
    notes = reports["locality"].block_hit_rate / without.block_hit_rate
    rows = [
        at_least("each prompt twice, notes of prompts in flight over none: hit rate", notes, 2.0),
        at_least(
            "conversations, notes over none: hit rate", as_it_is[0].block_hit_rate / as_it_is[1].block_hit_rate, 0.99
        ),
    ]
    over = found["locality_over"]
    assert isinstance(over, dict)
    routers = [over[name] for name in ("cache_aware", "cache_aware_bounded") if name in over]
    for title, key, bound in (
        ("hit rate", "block_hit_rate", 0.97),
        ("median time to first token", "ttft_p50", 0.9),
        ("99th percentile of it", "ttft_p99", 0.9),
    ):
        # The better of the two, whichever of them has less hits or more time.
        worst = min if key == "block_hit_rate" else max
        ratio = worst(each[key] for each in routers) if routers else None
        name = f"each prompt twice, over sglang-router: {title}"
        rows.append(
            Target(
                name=name,
                ratio=ratio,
                target=bound,
                at_most=key != "block_hit_rate",
                reason=None if routers else str(found["absent"]),
            )
        )
    return rows


async def large(server: RedisServer, options: argparse.Namespace) -> list[Target]:
    requests = rows_of(options, 12_031, speed=60.0, twice=False)
    before_s, began = await cpu_s(server), time.monotonic()
    report = await simulated(server, requests, workers=10_000, cache_blocks=400, gateways=20, cells=20)
    minutes, spent_s = (time.monotonic() - began) / 60, await cpu_s(server) - before_s
    assert report.requests + report.refused == len(requests)
    return [
        at_most("10,000 workers in 20 cells, a minute of load: minutes", minutes, 10.0),
        at_most("the same: CPU of Redis for a second of a cell", spent_s / report.simulated_s / 20, 0.5),
    ]


async def cpu_s(server: RedisServer) -> float:
    lines = dict(line.split(":", 1) for line in server.command("INFO", "cpu").splitlines() if ":" in line)
    return float(lines["used_cpu_user"]) + float(lines["used_cpu_sys"])


def at_most(name: str, ratio: float, bound: float) -> Target:
    return Target(name=name, ratio=ratio, target=bound, at_most=True)


def at_least(name: str, ratio: float, bound: float) -> Target:
    return Target(name=name, ratio=ratio, target=bound)


Part = Callable[[RedisServer, argparse.Namespace], Awaitable[list[Target]]]

PARTS: dict[str, Part] = {
    "decisions": decisions,
    "views": fleet_views,
    "index": index,
    "local": local,
    "candidates": candidates,
    "cells": cells,
    "peers": peers,
    "large": large,
}
WITH_TRACE = {"candidates", "cells", "peers", "large"}


async def judged(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Prints all rows, those of parts that only an earlier run has measured included. 1 if one is missed."""
    found: dict[str, list[Target]] = {}
    if options.keep and options.out.exists():
        found = msgspec.json.decode(options.out.read_bytes(), type=dict[str, list[Target]])
    for name in names:
        server = RedisServer.start()
        try:
            found[name] = await PARTS[name](server, options)
        finally:
            server.stop()
        if options.out is not None:
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    rows = [row for name in PARTS for row in found.get(name, ())]
    print(targets_table(rows))
    return int(any(row.ratio is not None and not row.met for row in rows))
