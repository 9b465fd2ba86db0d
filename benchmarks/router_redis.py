"""What one routing decision costs Redis: microseconds per call by fleet size, prompt length and cache state.

    python benchmarks/router_redis.py [--workers 8,64] [--tokens 1024,32768] [--calls 200] [--rounds 5] [--explained]
                                      [--views | --local] [--out r.json]
    python benchmarks/router_redis.py --targets [--only decisions,views,…] [--trace FILE] [--base COMMIT]
                                      [--peers-venv DIR] [--calls 320] [--rounds 3] [--out r.json [--keep]]

Starts its own redis-server on a free loopback port. For each case: CPU time of Redis per decision, network and protocol
included, with one caller and with 16 at once, and so the decisions per second of one core of Redis; the round trip that
one caller sees. Medians over rounds. Cases of cache state:

    cold      no worker has any block of the prompt
    shared    every worker has the same first quarter (a system prompt), one of them all of it
    ragged    every worker has a different share: the worst case for the search

`--explained`: every decision tells what it chose from, as explain shows it for some of them.

`--views`: instead of decisions, what heartbeats cost and what a gateway's view of the fleet costs each second, beside a
view that is read as a whole (`fleet_views.py`).

Then what a million blocks in the index take of Redis's memory; and a decision without Redis by the last view, with the
CPU of a gateway for its first view and for one in which nothing has changed. `--local`: only these.

`--targets`: a table in Markdown of all figures of the control plane that have a target (`scale_targets.py`), and exit
status 1 if one is missed. `--only` measures some parts of it; `--keep` prints the others as `--out` has them.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "operator", "lab", "tests/support", "benchmarks")]

from fleet_views import JOINS, FleetCosts, measure_views  # noqa: E402

from tandem_engine.base.clock import MonotonicClock  # noqa: E402
from tandem_engine.config import Role  # noqa: E402
from tandem_engine.messages.control import MAX_LINKS  # noqa: E402
from tandem_engine.messages.stats import LinkReport  # noqa: E402
from tandem_services.common.redis_client import RedisAddress, RedisClient  # noqa: E402
from tandem_services.router.cost import Demand, Load  # noqa: E402
from tandem_services.router.decision import WorkerView  # noqa: E402
from tandem_services.router.index import BlockIndex, IndexUpdate, UpdateKind  # noqa: E402
from tandem_services.router.keys import SMALL_FLEET, Keys  # noqa: E402
from tandem_services.router.local_choices import FewWorkers, LocalRouting, OwnLoad  # noqa: E402
from tandem_services.router.membership import Membership  # noqa: E402
from tandem_services.router.redis_functions import CONSTANTS, FunctionLibrary, library_source  # noqa: E402
from tandem_services.router.registry import Registry, WorkerRecord, WorkerState  # noqa: E402
from tandem_services.router.views.fleet_reader import FleetSnapshot  # noqa: E402
from tandem_testing.redis_server import RedisServer  # noqa: E402

PAGE = 16
MODEL = "bench"

CALLERS = 16
BEATING = 1024
FOREIGN = 500_000
"""Blocks of other prompts in the index, over all workers, at most 2000 each."""
LEASES = {"LEASE_MS": 3_600_000, "FENCE_AFTER_MS": 7_200_000, "DESCRIBED_TTL_MS": 3_600_000}
"""A fleet whose heartbeats take longer than a second stays registered and described."""
SLICE = 1000
"""Blocks of one update of the index."""


def record(number: int, workers: int) -> WorkerRecord:
    """Alternately a prefill and a decode worker."""
    view = WorkerView(
        worker_id=f"worker-{number}",
        incarnation=f"worker-{number}@{10**18 + number}",
        role=Role.PREFILL if number % 2 else Role.DECODE,
        request_endpoint="tcp://10.0.0.1:5600",
        peer_endpoint="tcp://10.0.0.1:5601",
        compat_hash="0123456789abcdef",
        context_length=131_072,
        page_size=PAGE,
        model=MODEL,
    )
    load = Load(
        queue_tokens=random.randrange(4096),
        prefill_rate=10_000,
        sequences=random.randrange(32),
        step_s=0.01,
        room_tokens=1_000_000,
        max_sequences=256,
        token_bytes=65_536,
    )
    return WorkerRecord(view=view, state=WorkerState.READY, load=load, details={}, links=links_of(number, workers))


def links_of(number: int, workers: int) -> tuple[LinkReport, ...]:
    """To every worker of the other role, as far as a report goes."""
    others = [each for each in range(workers) if each % 2 != number % 2][:MAX_LINKS]
    return tuple(
        LinkReport(peer=f"worker-{other}@{10**18 + other}", bytes_per_s=random.uniform(1e9, 1e10)) for other in others
    )


class Bench:
    def __init__(
        self,
        server: RedisServer,
        workers: int,
        *,
        explained: bool = False,
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.server, self.explained, self.cold = server, explained, False
        self.client = RedisClient(RedisAddress(url=server.url), timeout_s=5)
        library = FunctionLibrary(self.client, library_source({**CONSTANTS, **LEASES, **constants}))
        self.index = BlockIndex(library=library, keys=Keys("bench"))
        self.registry = Registry(library=library, keys=Keys("bench"))
        self.records = [record(n, workers) for n in range(workers)]
        self.generation = 0

    async def heartbeats(self, *, describe: bool = True) -> None:
        for each in self.records:
            reply = await self.registry.heartbeat(
                each, known_generation=self.generation, report_age_s=0.2, describe=describe
            )
            self.generation = reply.generation

    async def some_heartbeats(self) -> None:
        """Of at most BEATING workers: their rows are new to the next decisions, as in a running fleet."""
        for each in random.sample(self.records, min(BEATING, len(self.records))):
            await self.registry.heartbeat(
                each, known_generation=self.generation, report_age_s=0.2, describe=len(self.records) <= SMALL_FLEET
            )

    async def fill(self, state: str, chain: list[bytes]) -> None:
        """Every worker holds foreign blocks beside its share of the prompt."""
        self.cold = state == "cold"
        for number, each in enumerate(self.records):
            if state == "cold":
                held = 0
            elif state == "shared":
                held = len(chain) if number == 0 else len(chain) // 4
            else:
                held = random.randint(1, len(chain))
            foreign = [os.urandom(16) for _ in range(min(2000, FOREIGN // len(self.records)))]
            updates = [IndexUpdate(UpdateKind.CLEARED), IndexUpdate(UpdateKind.STORED, tuple(foreign + chain[:held]))]
            await self.index.apply(each.view.incarnation, updates, page_size=PAGE, builds_on=-1, revision=1)

    async def decide(self, chain: bytes, tokens: int) -> None:
        demand = Demand(prompt_tokens=tokens, output_tokens=256, local_prefill_tokens=16)
        seed = random.getrandbits(31)
        routed = await self.index.route(
            model=MODEL,
            demand=demand,
            page_size=PAGE,
            chain=chain,
            exclude=frozenset(),
            seed=seed,
            explained=self.explained,
        )
        assert routed is not None, "no choice"

    async def redis_cpu_s(self) -> float:
        """CPU seconds of Redis so far: unlike wall time, meaningful on a busy machine."""
        fields = await self.info("cpu")
        return float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"])

    async def info(self, section: str) -> dict[str, str]:
        stats = await asyncio.to_thread(self.server.command, "INFO", section)
        return dict(line.split(":", 1) for line in stats.splitlines() if ":" in line)


@dataclass(frozen=True, kw_only=True)
class Case:
    workers: int
    tokens: int
    state: str
    explained: bool = False
    constants: Mapping[str, float] = field(default_factory=dict)
    """Of the functions, other than those of the product."""


async def measure(server: RedisServer, case: Case, *, calls: int, rounds: int) -> dict[str, object]:
    await asyncio.to_thread(server.command, "FLUSHALL")
    bench = Bench(server, case.workers, explained=case.explained, constants=case.constants)
    chain = [os.urandom(16) for _ in range(case.tokens // PAGE)]
    packed = b"".join(chain)
    await bench.fill(case.state, chain)
    await bench.heartbeats()
    await callers(bench, packed, case.tokens, 1, 20)
    alone, many, round_trips, client = [], [], [], []
    for _ in range(rounds):
        await bench.some_heartbeats()
        began = time.perf_counter()
        alone.append(await redis_us(bench, packed, case.tokens, 1, calls))
        round_trips.append((time.perf_counter() - began) / calls * 1e6)
        await bench.some_heartbeats()
        cpu = time.process_time()
        many.append(await redis_us(bench, packed, case.tokens, CALLERS, calls // CALLERS))
        client.append((time.process_time() - cpu) / (calls // CALLERS * CALLERS) * 1e6)
    await bench.client.close()
    return {
        "workers": case.workers,
        "prompt_tokens": case.tokens,
        "cache": case.state,
        "explained": case.explained,
        "redis_us": round(median(many), 1),
        "redis_us_one_caller": round(median(alone), 1),
        "redis_core_decisions_per_s": round(1e6 / median(many)),
        "round_trip_us": round(median(round_trips), 1),
        "client_cpu_us": round(median(client), 1),
    }


async def redis_us(bench: Bench, chain: bytes, tokens: int, at_once: int, each: int) -> float:
    """CPU microseconds of Redis per decision."""
    before = await bench.redis_cpu_s()
    await callers(bench, chain, tokens, at_once, each)
    return (await bench.redis_cpu_s() - before) / (at_once * each) * 1e6


async def callers(bench: Bench, chain: bytes, tokens: int, at_once: int, each: int) -> None:
    async def caller() -> None:
        for _ in range(each):
            # A prompt in flight counts as cached: a cold one has to be another each time.
            await bench.decide(os.urandom(len(chain)) if bench.cold else chain, tokens)

    await asyncio.gather(*(caller() for _ in range(at_once)))


async def index_bytes(server: RedisServer, blocks: int) -> dict[str, float]:
    """What `blocks` blocks of one worker take of Redis's memory."""
    await asyncio.to_thread(server.command, "FLUSHALL")
    bench = Bench(server, 1)
    before = await used_memory(bench)
    revision = 1
    await bench.index.apply(
        "worker-0@1", [IndexUpdate(UpdateKind.CLEARED)], page_size=PAGE, builds_on=-1, revision=revision
    )
    for _ in range(blocks // SLICE):
        stored = IndexUpdate(UpdateKind.STORED, tuple(os.urandom(16) for _ in range(SLICE)))
        await bench.index.apply("worker-0@1", [stored], page_size=PAGE, builds_on=revision, revision=revision + 1)
        revision += 1
    taken = await used_memory(bench) - before
    await bench.client.close()
    return {"blocks": blocks, "mib_per_million_blocks": round(taken / blocks * 1e6 / 2**20, 1)}


async def used_memory(bench: Bench) -> float:
    return float((await bench.info("memory"))["used_memory"])


def local_us(workers: int, calls: int) -> dict[str, float]:
    """CPU of a decision by the last view, without Redis. Hashing the prompt is not included."""
    own, rng = OwnLoad(clock=MonotonicClock()), random.Random(1)
    members, routing = Membership(clock=own.clock), LocalRouting(own=own, random=rng)
    records = tuple(record(number, workers) for number in range(workers))
    began = time.thread_time()
    members.update(FleetSnapshot(epoch="", workers=records, malformed=0))
    first_view_s = time.thread_time() - began
    few = FewWorkers(membership=members, own=own, random=rng)
    demand = Demand(prompt_tokens=32_768, output_tokens=256, local_prefill_tokens=2048)
    seconds = []
    for _ in range(calls):
        first_block = os.urandom(16)
        began = time.thread_time()
        found = few.find(MODEL, prompt_tokens=demand.prompt_tokens, first_block=first_block)
        option = routing.choose(found, demand)
        seconds.append(time.thread_time() - began)
        assert option is not None
    seconds.sort()
    return {
        "workers": workers,
        "p50_us": round(seconds[calls // 2] * 1e6, 1),
        "p99_us": round(seconds[int(calls * 0.99)] * 1e6, 1),
        "first_view_ms": round(first_view_s * 1e3, 1),
        "view_ms": round(view_ms(members, records), 2),
    }


def view_ms(members: Membership, records: tuple[WorkerRecord, ...]) -> float:
    """CPU of a view in which nothing has changed."""
    began = time.thread_time()
    for _ in range(10):
        members.update(FleetSnapshot(epoch="", workers=records, malformed=0))
    return (time.thread_time() - began) * 100


async def views(server: RedisServer, workers: int, *, rounds: int) -> FleetCosts:
    records = [record(number, workers) for number in range(workers + JOINS)]
    return await measure_views(server, records[:workers], records[workers:], rounds=rounds)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--tokens", default="1024,32768")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--explained", action="store_true")
    parser.add_argument("--views", action="store_true")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--targets", action="store_true")
    parser.add_argument("--only", help="parts of --targets, separated by commas")
    parser.add_argument("--trace", type=Path, help="the conversation trace, for parts of --targets")
    parser.add_argument("--base", help="an earlier checkout or commit, for a part of --targets")
    parser.add_argument("--peers-venv", type=Path, default=os.environ.get("TANDEM_PEERS_VENV"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    random.seed(1)
    if arguments.targets:
        return await judge(parser, arguments)
    fleets = [int(workers) for workers in arguments.workers.split(",")]
    machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    if arguments.local:
        report({**machine, "local": local_costs(fleets)}, arguments.out)
        return 0
    server = RedisServer.start()
    try:
        if arguments.views:
            found = [await views(server, workers, rounds=arguments.rounds) for workers in fleets]
            report({**machine, "views": [each._asdict() for each in found]}, arguments.out)
            return 0
        cases = [
            await measure(
                server,
                Case(workers=workers, tokens=int(tokens), state=state, explained=arguments.explained),
                calls=arguments.calls,
                rounds=arguments.rounds,
            )
            for workers in fleets
            for tokens in arguments.tokens.split(",")
            for state in ("cold", "shared", "ragged")
        ]
        index = await index_bytes(server, arguments.blocks)
    finally:
        server.stop()
    report({**machine, "cases": cases, "index": index, "local": local_costs(fleets)}, arguments.out)
    return 0


async def judge(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """`--targets`."""
    from scale_targets import PARTS, WITH_TRACE, judged

    names = arguments.only.split(",") if arguments.only else [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if arguments.trace is None and (tracing := [name for name in names if name in WITH_TRACE]):
        parser.error(f"{', '.join(tracing)} need --trace; or leave them out with --only")
    if arguments.keep and arguments.out is None:
        parser.error("--keep needs the --out of the earlier run")
    return await judged(arguments, names)


def local_costs(fleets: list[int]) -> list[dict[str, float]]:
    return [local_us(workers, 1000) for workers in fleets]


def report(found: dict[str, object], out: Path | None) -> None:
    text = json.dumps(found, indent=1)
    if out:
        out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
