"""Where requests go: our router beside sglang-router's `cache_aware` and round robin, on a trace, by block hit rate.

    python benchmarks/routing_peers.py --trace conversation_trace.jsonl [--peers-venv DIR] [--workers 8]
                                       [--cache-share 0.1] [--num-prompts N] [--speed 1.0] [--doubled] [--out r.json]

All in the simulator (`tandem simulate`, docs/simulate.md): modelled workers, service times and caches are the same,
and so is the report; only the router differs. sglang-router is the real program, from the virtual environment that
`--peers-venv` or TANDEM_PEERS_VENV names: each simulated request is sent to it over HTTP, the mock worker that gets it
is the modelled worker that serves it, and its answer is held back until the modelled worker has ended, so that the
router sees the loads of the simulation. A prompt's text is a few characters for each of its blocks.

    cache_aware          as it starts by default: its record of what a worker has been sent grows without an end here
    cache_aware_bounded  the record of a worker is as large as its cache (--max-tree-size), trimmed each second
    round_robin          ours, by name

`--doubled`: each prompt arrives a second time within two seconds, as from agents, retries and evaluations. With
`--num-prompts 2500 --speed 0.55` workers are as busy as with the trace as it is.

It sees requests and answers; our router sees what workers say is cached, as it would in a deployment. Requests that no
worker has room for wait in our gateway's queue, and sglang-router's at the worker that it names.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import msgspec  # noqa: E402
import uvloop  # noqa: E402
from http_worker import ANSWERS, RequestReader, whole  # noqa: E402
from pinned_processes import START_S, process, wait_until_up  # noqa: E402

from tandem_lab.simulate.clock import EventQueue, SimulatedRedis  # noqa: E402
from tandem_lab.simulate.fleet import Fleet, FleetShape  # noqa: E402
from tandem_lab.simulate.replay import Replay, replay  # noqa: E402
from tandem_lab.simulate.report import PolicyReport, TraceLimits, policy_report  # noqa: E402
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests  # noqa: E402
from tandem_lab.simulate.run import Simulation, distinct_blocks  # noqa: E402
from tandem_lab.traces import TRACE_BLOCK, TraceRow, read_trace  # noqa: E402
from tandem_services.cli.processes import Supervisor  # noqa: E402
from tandem_services.cli.redis_process import start_redis  # noqa: E402
from tandem_services.common.redis_client import RedisAddress  # noqa: E402
from tandem_services.common.sockets import free_port  # noqa: E402
from tandem_services.router.decision import Placement, Reservation, RouteDecision, RouteQuery, Source, WorkerView  # noqa: E402
from tandem_services.router.policies import PolicyNames  # noqa: E402
from tandem_services.router.router import RouterCounters  # noqa: E402

BLOCK_CHARACTERS = 16
CHOICE_S = 30.0
PROGRESS_EVERY = 2000
AGAIN_WITHIN_S = 2.0


class HeldRequest:
    """One request on its way through the other router: its client's connection, and the worker's that has it."""

    def __init__(self, arrived: "asyncio.Future[tuple[int, asyncio.Transport]]") -> None:
        self.arrived = arrived
        self.connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None


class WorkerPort(RequestReader):
    """A worker's HTTP side: records which system sends which request, and answers without output."""

    def __init__(self, worker: int, held: dict[str, HeldRequest]) -> None:
        super().__init__()
        self._worker = worker
        self._held = held

    def handle(self, path: str, body: bytes) -> None:
        if path == "/generate":
            name = json.loads(body)["rid"]
            self._held[name].arrived.set_result((self._worker, self._transport))
        else:
            self._transport.write(whole(ANSWERS.get(path, {"status": "ok"})))


class SglangRouter:
    """A `Chooser` that asks sglang-router. An asynchronous context manager."""

    def __init__(self, python: Path, flags: list[str], fleet: Fleet, workers: int) -> None:
        """`workers`: how many `fleet` will have once it has begun."""
        self.counters = RouterCounters()
        self._python = python
        self._flags = flags
        self._fleet = fleet
        self._workers = workers
        self._views: list[WorkerView] = []
        self._held: dict[str, HeldRequest] = {}
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._servers: list[asyncio.Server] = []
        self._stack = ExitStack()
        self._serial = 0

    async def __aenter__(self) -> "SglangRouter":
        loop = asyncio.get_running_loop()
        for number in range(self._workers):
            server = await loop.create_server(lambda number=number: WorkerPort(number, self._held), "127.0.0.1", 0)
            self._servers.append(server)
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in self._servers]
        self._port, metrics = free_port(), free_port()
        command = [str(self._python), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "error"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), *self._flags]
        command += ["--max-concurrent-requests", "-1", "--disable-retries", "--request-timeout-secs", "3600"]
        started = self._stack.enter_context(process(command))
        await asyncio.to_thread(wait_until_up, started, self._port)
        await self._all_workers_seen()
        return self

    async def _all_workers_seen(self) -> None:
        """Until it has seen its workers it refuses everything. Raises `TimeoutError`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(b"GET /readiness HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b'"healthy_workers":%d,' % self._workers in answer:
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"sglang-router has not seen its {self._workers} workers after {START_S} s: {answer!r}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for server in self._servers:
            server.close()

    async def refresh(self) -> None:
        """It looks at its workers by itself; which of the modelled ones they are is known from the fleet's start on."""
        self._views = [self._fleet.view(worker) for worker in self._fleet.workers.values()]

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(self._views)

    async def choose(self, query: RouteQuery) -> RouteDecision:
        held = HeldRequest(asyncio.get_running_loop().create_future())
        self._held[query.request_id] = held
        held.connection = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        sampling = {"max_new_tokens": query.max_tokens}
        asked = {"text": text_of(query.token_ids), "rid": query.request_id, "sampling_params": sampling}
        body = json.dumps(asked).encode()
        fields = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        held.connection[1].write(f"POST /generate HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        async with asyncio.timeout(CHOICE_S):
            worker, _ = await held.arrived
        self._serial += 1
        self.counters.placements[Placement.ALONE] += 1
        return RouteDecision(
            request_id=query.request_id,
            decode=self._views[worker],
            prefill=None,
            source=Source.REDIS,
            placement=Placement.ALONE,
            terms=(),
            matched_tokens=0,
            reservation=Reservation(None, (), self._serial),
        )

    async def release(self, choice: RouteDecision) -> None:
        held = self._held.pop(choice.request_id)
        _, worker = held.arrived.result()
        worker.write(whole({"text": "x", "meta_info": {"finish_reason": {"type": "length"}}}))
        assert held.connection is not None
        reader, _ = held.connection
        async with asyncio.timeout(CHOICE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            _, found, length = head.lower().partition(b"content-length:")
            assert found, head
            await reader.readexactly(int(length.split(b"\r\n")[0]))
        self._idle.append(held.connection)


def text_of(token_ids: tuple[int, ...]) -> str:
    """A few characters for each block of the prompt, and for a last one that is not full."""
    starts = range(0, len(token_ids), TRACE_BLOCK)
    return "".join([bytes(token_ids[start : start + BLOCK_CHARACTERS // 2]).hex() for start in starts])


class Progress:
    """A line for each so many requests served: a whole trace takes minutes."""

    def __init__(self, name: str, requests: int) -> None:
        self._name = name
        self._requests = requests
        self._served = 0
        self._began = time.monotonic()

    def __call__(self) -> None:
        self._served += 1
        if self._served % PROGRESS_EVERY == 0 or self._served == self._requests:
            took = time.monotonic() - self._began
            print(f"{self._name}: {self._served} of {self._requests} requests, {took:.0f} s", file=sys.stderr)


async def replay_with_sglang(
    requests: list[SimulatedRequest], shape: FleetShape, redis: RedisAddress, python: Path, flags: list[str], name: str
) -> "PolicyReport":
    events = EventQueue()
    simulated = SimulatedRedis(address=redis, cluster=name, events=events)
    fleet = Fleet(shape, simulated)
    try:
        async with SglangRouter(python, flags, fleet, shape.size) as router:
            outcome = await Replay(requests, fleet, [router], shape, Progress(name, len(requests))).to_the_end()
    finally:
        await simulated.client.close()
    return policy_report(outcome, pooled=limits_of(requests, shape).pooled_lru_hit_rate, slo=None)


def limits_of(requests: list[SimulatedRequest], shape: FleetShape) -> TraceLimits:
    return Simulation(requests=requests, shape=shape, policies={}, local_prefill_tokens=0, seed=0).limits()


def doubled(rows: Iterable[TraceRow], *, speed: float, seed: int) -> Iterator[TraceRow]:
    """Each row, and the same once more up to `AGAIN_WITHIN_S` later at that speed."""
    random = Random(seed)
    for row in rows:
        yield row
        yield replace(row, at=row.at + random.uniform(0.0, AGAIN_WITHIN_S) * speed)


async def run_all(options: argparse.Namespace, redis: RedisAddress) -> dict[str, object]:
    rows: Iterable[TraceRow] = islice(read_trace(options.trace), options.num_prompts)
    if options.doubled:
        rows = doubled(rows, speed=options.speed, seed=options.seed)
    requests = simulated_requests(rows, limit=None, speed=options.speed)
    blocks = int(distinct_blocks(requests) * options.cache_share) // options.workers
    shape = FleetShape(both=options.workers, cache_blocks=blocks, block_tokens=TRACE_BLOCK)
    limits = limits_of(requests, shape)
    reports: dict[str, PolicyReport] = {}
    for policy in ("locality", "round_robin"):
        outcome = await replay(
            requests,
            shape,
            redis=redis,
            cluster=policy,
            policies=PolicyNames.parse(policy),
            local_prefill_tokens=2048,
            seed=options.seed,
            on_served=Progress(policy, len(requests)),
        )
        reports[policy] = policy_report(outcome, pooled=limits.pooled_lru_hit_rate, slo=None)
    missing = absent(options)
    if missing is None:
        bounded = ["--max-tree-size", str(blocks * BLOCK_CHARACTERS), "--eviction-interval-secs", "1"]
        python = Path(options.peers_venv) / "bin" / "python"
        for name, flags in (("cache_aware", []), ("cache_aware_bounded", bounded)):
            policy = ["--policy", "cache_aware", *flags]
            reports[name] = await replay_with_sglang(requests, shape, redis, python, policy, name)
    else:
        print(f"sglang-router is left out: {missing}", file=sys.stderr)
    ours = reports["locality"]
    over = {name: over_peer(ours, each) for name, each in reports.items() if name != "locality"}
    return {
        "trace": msgspec.to_builtins(limits),
        "policies": msgspec.to_builtins(reports),
        "locality_over": over,
        "absent": missing,
    }


def over_peer(ours: PolicyReport, peer: PolicyReport) -> dict[str, float]:
    """Ratios. Of the hit rate more is better, of times less."""
    our_ttft, their_ttft = msgspec.to_builtins(ours.ttft_ms), msgspec.to_builtins(peer.ttft_ms)
    times = {f"ttft_{name}": round(our_ttft[name] / their_ttft[name], 3) for name in ("mean", "p50", "p99")}
    return {"block_hit_rate": round(ours.block_hit_rate / peer.block_hit_rate, 3), **times}


def absent(options: argparse.Namespace) -> str | None:
    """Why sglang-router cannot be asked here."""
    if options.peers_venv is None:
        return "name a virtual environment that has sglang-router with --peers-venv or TANDEM_PEERS_VENV"
    found = Path(options.peers_venv) / "bin" / "sglang-router"
    return None if found.exists() else f"{found} does not exist: {options.peers_venv}/bin/pip install sglang-router"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--peers-venv", type=Path, default=os.environ.get("TANDEM_PEERS_VENV"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--cache-share", type=float, default=0.1)
    parser.add_argument("--num-prompts", type=int, help="the first N requests of the trace (default: all)")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as the trace")
    parser.add_argument("--doubled", action="store_true", help="each prompt arrives again within two seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    supervisor = Supervisor()
    with TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        try:
            redis = RedisAddress(url=start_redis(supervisor, Path(folder)))
            results = json.dumps(uvloop.run(run_all(options, redis)), indent=2)
        finally:
            supervisor.stop(grace=5.0)
    print(results)
    if options.out is not None:
        options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
