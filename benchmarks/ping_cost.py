"""What pings of all workers would cost a gateway, and what one costs that is connected to few ahead; CPU at idle.

    python benchmarks/ping_cost.py [--workers 64] [--seconds 20] [--rounds 3]

Mock workers, in a process of their own, answer over authenticated sockets. Figures are shares of one core, one for each
round, from CPU time; `ping_us` is the difference of the first two, for one ping and its answer.

    pings    an `EnginePool` alone that asks all workers, as if Redis named none: one ping a second to each
    sockets  the same pool with pings an hour apart: what ZeroMQ does by itself
    gateway  a whole `tandem gateway` that serves nothing: pings, its view of the fleet from Redis, timers
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import uvloop  # noqa: E402
from mock_fleet import behaviour, keep_registered, mock_checkpoint, mock_tokenizer  # noqa: E402
from pinned_processes import cpu_seconds, process, wait_until_up  # noqa: E402

from tandem_engine.base.clock import MonotonicClock  # noqa: E402
from tandem_engine.config import Role  # noqa: E402
from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_engine.ipc.keys import KeyPair  # noqa: E402
from tandem_services.common.sockets import free_port  # noqa: E402
from tandem_services.gateway.dispatch.engine_client import LivenessTiming, Revival  # noqa: E402
from tandem_services.gateway.dispatch.engine_pool import AHEAD, EnginePool  # noqa: E402
from tandem_services.router.decision import WorkerView  # noqa: E402
from tandem_testing.mock_engine import MockEngine  # noqa: E402
from tandem_testing.redis_server import RedisServer  # noqa: E402
from tandem_testing.waiting import wait_for  # noqa: E402

NEVER_S = 3600.0
PATIENCE_S = 120.0
SOME = 3
"""Pings, after which a gateway has connected to the workers that it is connected to ahead."""


def run_engines(keys: str, redis_url: str, workers: int) -> None:
    """Serve; prints the views of all, and a line when each has had some pings. Registered where there is a Redis."""
    context, answers = IpcContext(KeyPair.load(Path(keys))), behaviour(mock_tokenizer(), step_s=0.0)
    engines = [
        MockEngine(context=context, worker_id=f"mock-{number}", behavior=answers).start() for number in range(workers)
    ]
    print(json.dumps([asdict(engine.view) for engine in engines]), flush=True)
    if redis_url:
        threading.Thread(
            target=lambda: asyncio.run(keep_registered(redis_url, engines, context.keys)), daemon=True
        ).start()
        wait_for(lambda: sum(engine.pings >= SOME for engine in engines) >= min(AHEAD, workers), PATIENCE_S)
        print("pinged", flush=True)
    sys.stdin.read()


async def run_pool(keys: str, interval_s: float) -> None:
    """Watch the workers whose views come on standard input; prints a line when all of them have answered."""
    views = [WorkerView(**{**view, "role": Role(view["role"])}) for view in json.loads(sys.stdin.readline())]
    context, clock = IpcContext(KeyPair.load(Path(keys))), MonotonicClock()
    pool = EnginePool(
        context=context,
        timing=LivenessTiming(ping_interval_s=interval_s),
        on_dead=lambda incarnation: sys.exit(f"{incarnation} was found dead"),
        revival=Revival(context=context, clock=clock, on_alive=lambda _: None),
        clock=clock,
    )
    pool.watch(views, unlisted=frozenset(view.incarnation for view in views))
    for view in views:
        assert await pool.prove(view, within_s=60.0), f"{view.incarnation} does not answer"
    print("ready", flush=True)
    await asyncio.Event().wait()


def idle_share(pid: int, seconds: float) -> float:
    """Of one core, over `seconds`."""
    cpu, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pid) - cpu) / (time.perf_counter() - began)


def pool_share(stack: ExitStack, keys: Path, workers: int, seconds: float, interval_s: float) -> float:
    engines = stack.enter_context(
        process([sys.executable, __file__, "engines", str(keys), "", str(workers)], piped=True)
    )
    pool = stack.enter_context(process([sys.executable, __file__, "pool", str(keys), str(interval_s)], piped=True))
    assert engines.stdout is not None
    assert pool.stdin is not None
    assert pool.stdout is not None
    pool.stdin.write(engines.stdout.readline())
    pool.stdin.flush()
    assert pool.stdout.readline() == "ready\n", "the pool did not reach every worker"
    return idle_share(pool.pid, seconds)


def gateway_share(stack: ExitStack, keys: Path, workers: int, seconds: float) -> float:
    redis = RedisServer.start()
    stack.callback(redis.stop)
    folder = mock_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-benchmark-"))))
    command = [sys.executable, __file__, "engines", str(keys), redis.url, str(workers)]
    engines = stack.enter_context(process(command, piped=True))
    assert engines.stdout is not None
    engines.stdout.readline()
    port = free_port()
    flags = ["--model", str(folder), "--served-model-name", "mock", "--port", str(port), "--redis-url", redis.url]
    command = [sys.executable, "-m", "tandem_services.cli.main", "gateway", *flags, "--curve-keys", str(keys)]
    gateway = stack.enter_context(process(command))
    wait_until_up(gateway, port)
    assert engines.stdout.readline() == "pinged\n", "the gateway did not ping every worker"
    return idle_share(gateway.pid, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    shares: dict[str, list[float]] = {"pings": [], "sockets": [], "gateway": []}
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        keys = Path(folder) / "keys.json"
        KeyPair.generate().save(keys)
        for _ in range(args.rounds):
            for name, interval_s in (("pings", LivenessTiming().ping_interval_s), ("sockets", NEVER_S)):
                with ExitStack() as stack:
                    shares[name].append(pool_share(stack, keys, args.workers, args.seconds, interval_s))
            with ExitStack() as stack:
                shares["gateway"].append(gateway_share(stack, keys, args.workers, args.seconds))
    figures = {name: [round(share, 4) for share in sorted(each)] for name, each in shares.items()}
    cost = statistics.median(shares["pings"]) - statistics.median(shares["sockets"])
    print(json.dumps({"workers": args.workers, **figures, "ping_us": round(1e6 * cost / args.workers, 1)}))
    return 0


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["engines"]:
            run_engines(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        case ["pool"]:
            uvloop.run(run_pool(sys.argv[2], float(sys.argv[3])))
        case _:
            sys.exit(main())
