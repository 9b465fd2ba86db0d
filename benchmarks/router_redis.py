"""What one routing decision costs Redis: microseconds per call by fleet size, prompt length and cache state.

    python benchmarks/router_redis.py [--workers 8,64] [--tokens 1024,32768] [--calls 300] [--out results.json]

Starts its own redis-server on a free loopback port. For each case: CPU time of Redis per decision (network
and protocol included), round trip seen by one client, and decisions per
second that one Redis core sustains under 16 concurrent callers. Cases of cache state:

    cold      no worker has any block of the prompt
    shared    every worker has the same first quarter (a system prompt), one of them all of it
    ragged    every worker has a different share: the worst case for the search
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "tests/support")]

from tandem_engine.config import Role  # noqa: E402
from tandem_engine.messages.control import MAX_LINKS, LinkReport  # noqa: E402
from tandem_services.common.redis_client import RedisAddress, RedisClient  # noqa: E402
from tandem_services.router.choice import WorkerView  # noqa: E402
from tandem_services.router.cost import Demand, Load  # noqa: E402
from tandem_services.router.index import BlockIndex, IndexUpdate, UpdateKind  # noqa: E402
from tandem_services.router.keys import Keys  # noqa: E402
from tandem_services.router.library import FunctionLibrary  # noqa: E402
from tandem_services.router.registry import Registry, WorkerRecord, WorkerState  # noqa: E402
from tandem_testing.redis_server import RedisServer  # noqa: E402

PAGE = 16
MODEL = "bench"


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
    def __init__(self, server: RedisServer, workers: int) -> None:
        self.server = server
        self.client = RedisClient(RedisAddress(url=server.url), timeout_s=5)
        library = FunctionLibrary(self.client)
        self.index = BlockIndex(library=library, keys=Keys("bench"))
        self.registry = Registry(library=library, keys=Keys("bench"))
        self.records = [record(n, workers) for n in range(workers)]

    async def heartbeats(self) -> None:
        for each in self.records:
            await self.registry.heartbeat(each, deployment="bench", known_generation=0, report_age_s=0.2)

    async def keep_alive(self) -> None:
        while True:
            await self.heartbeats()
            await asyncio.sleep(1)

    async def fill(self, state: str, chain: list[bytes]) -> None:
        """Every worker holds 2000 foreign blocks beside its share of the prompt."""
        for number, each in enumerate(self.records):
            if state == "cold":
                held = 0
            elif state == "shared":
                held = len(chain) if number == 0 else len(chain) // 4
            else:
                held = random.randint(1, len(chain))
            foreign = [os.urandom(16) for _ in range(2000)]
            updates = [IndexUpdate(UpdateKind.CLEARED), IndexUpdate(UpdateKind.STORED, tuple(foreign + chain[:held]))]
            await self.index.apply(each.view.incarnation, updates, builds_on=-1, revision=1)

    async def decide(self, chain: bytes, tokens: int) -> None:
        demand = Demand(prompt_tokens=tokens, output_tokens=256, local_prefill_tokens=16)
        seed = random.getrandbits(31)
        routed = await self.index.route(
            model=MODEL, demand=demand, page_size=PAGE, chain=chain, exclude=frozenset(), seed=seed
        )
        assert routed is not None, "no choice"

    async def redis_cpu_s(self) -> float:
        """CPU seconds of Redis so far: unlike wall time, meaningful on a busy machine."""
        stats = await asyncio.to_thread(self.server.command, "INFO", "cpu")
        fields = dict(line.split(":", 1) for line in stats.splitlines() if ":" in line)
        return float(fields["used_cpu_user"]) + float(fields["used_cpu_sys"])


async def case(server: RedisServer, *, workers: int, tokens: int, state: str, calls: int) -> dict[str, object]:
    await asyncio.to_thread(server.command, "FLUSHALL")
    bench = Bench(server, workers)
    chain = [os.urandom(16) for _ in range(tokens // PAGE)]
    packed = b"".join(chain)
    await bench.fill(state, chain)
    await bench.heartbeats()
    heart = asyncio.create_task(bench.keep_alive())
    for _ in range(20):
        await bench.decide(packed, tokens)
    cpu_before = await bench.redis_cpu_s()
    started = time.perf_counter()
    for _ in range(calls):
        await bench.decide(packed, tokens)
    round_trip = (time.perf_counter() - started) / calls
    redis_us = (await bench.redis_cpu_s() - cpu_before) / calls * 1e6
    cpu = os.times()
    started = time.perf_counter()
    await asyncio.gather(*(caller(bench, packed, tokens, calls // 4) for _ in range(16)))
    elapsed = time.perf_counter() - started
    client_cpu = sum(os.times()[:2]) - sum(cpu[:2])
    heart.cancel()
    await asyncio.gather(heart, return_exceptions=True)
    await bench.client.close()
    return {
        "workers": workers,
        "prompt_tokens": tokens,
        "blocks": tokens // PAGE,
        "cache": state,
        "redis_us": round(redis_us, 1),
        "redis_core_decisions_per_s": round(1e6 / redis_us),
        "round_trip_us": round(round_trip * 1e6, 1),
        "one_client_process_decisions_per_s": round(16 * (calls // 4) / elapsed),
        "client_cpu_us": round(client_cpu * 1e6 / (16 * (calls // 4)), 1),
    }


async def caller(bench: Bench, chain: bytes, tokens: int, calls: int) -> None:
    for _ in range(calls):
        await bench.decide(chain, tokens)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--tokens", default="1024,32768")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    server = RedisServer.start()
    try:
        cases = [
            await case(server, workers=int(workers), tokens=int(tokens), state=state, calls=arguments.calls)
            for workers in arguments.workers.split(",")
            for tokens in arguments.tokens.split(",")
            for state in ("cold", "shared", "ragged")
        ]
    finally:
        server.stop()
    report = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "cases": cases}
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    asyncio.run(main())
