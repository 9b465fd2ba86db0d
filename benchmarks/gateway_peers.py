"""Our gateway beside public ones: CPU per request and per streamed token, and latency, in the same run.

    python benchmarks/gateway_peers.py [--peers-venv DIR] [--only tandem,sglang-cache_aware] [--requests 800]
                                       [--streams 64] [--tokens 64] [--step-ms 10] [--rate 400] [--rounds 1]
                                       [--out r.json]

Peers live in a virtual environment of their own (`python -m venv DIR; DIR/bin/pip install sglang-router
'litellm[proxy]'`), named by `--peers-venv` or TANDEM_PEERS_VENV; nginx is taken from PATH. What is not there is named
in the report and left out.

Each gateway runs on one core in front of four mock workers that cost hardly anything and whose tokens are a function of
the prompt; workers, Redis and the load generator share the other cores. Every token of every answer is checked. Ours is
`tandem gateway` with its router and Redis, and its workers speak our engines' protocol; the others' speak OpenAI's over
HTTP. Figures are per core: work divided by the CPU time of the gateway's processes. What Redis used is added to ours.

    whole     chat, not streamed, one token, 16 at once
    streamed  chat, streamed, one token per event and step, `--streams` at once
    latency   as `whole`, at half of `--rate` requests a second: from request to last byte, workers and load generator
              included, so more than the gateway adds

They forward bytes. Ours renders and tokenises the prompt, routes on what is cached where, reserves, detokenises, and
can resume a stream on another worker.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [str(ROOT / part) for part in ("engine", "services", "tests/support", "benchmarks")]
sys.path[:0] = SOURCES

import uvloop  # noqa: E402
from chat_load import Question, Timings, closed_loop, letters, open_loop  # noqa: E402
from mock_fleet import (  # noqa: E402
    CONTEXT_LENGTH,
    behaviour,
    expected_answer,
    keep_registered,
    mock_checkpoint,
    mock_tokenizer,
)

from tandem_engine.ipc.channels import IpcContext  # noqa: E402
from tandem_services.common.ports import free_port  # noqa: E402
from tandem_testing.mock_engine import MockEngine  # noqa: E402
from tandem_testing.redis_server import RedisServer  # noqa: E402

WORKERS = 4
START_S = 90.0
GATEWAY_CORES = {min(os.sched_getaffinity(0))}
OTHER_CORES = os.sched_getaffinity(0) - GATEWAY_CORES or GATEWAY_CORES


@dataclass(frozen=True, kw_only=True)
class Case:
    clients: int
    requests: int
    tokens: int
    stream: bool
    step_s: float = 0.0
    rate: float = 0.0
    """Requests a second, however many are open; 0: `clients` at once."""


@dataclass(kw_only=True)
class Running:
    """One gateway with its workers."""

    port: int
    pids: list[int]
    expected: Callable[[str, int], str]
    told: Callable[[], dict[str, float]] = dict
    """Figures that it has of itself."""


System = Callable[[ExitStack, Case, argparse.Namespace], Running]


def tandem(stack: ExitStack, case: Case, options: argparse.Namespace) -> Running:
    redis = RedisServer.start()
    stack.callback(redis.stop)
    assert redis.process is not None
    os.sched_setaffinity(redis.process.pid, OTHER_CORES)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-benchmark-")))
    mock_checkpoint(folder)
    fleet_of = ["--fleet", redis.url, str(case.step_s), str(options.workers)]
    fleet = stack.enter_context(process([sys.executable, __file__, *fleet_of], told=True))
    assert fleet.stdout is not None
    fleet.stdout.readline()
    port = free_port()
    flags = ["--model", str(folder), "--served-model-name", "mock", "--port", str(port), "--redis-url", redis.url]
    command = [sys.executable, "-m", "tandem_services.cli.main", "gateway", *flags, "--drain-notice", "0"]
    gateway = stack.enter_context(process(command, cores=GATEWAY_CORES))
    wait_until_up(gateway, port)
    return Running(
        port=port,
        pids=[gateway.pid, redis.process.pid],
        expected=expected_answer(mock_tokenizer()),
        told=lambda: {"share_routed_by_redis": share_routed_by_redis(port)},
    )


def share_routed_by_redis(port: int) -> float:
    """Of all decisions; the others were made without it, by the view that the gateway had."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.rpartition(" ") for line in lines if line.startswith("tandem_gateway_route_decisions_total{")]
    by_redis = sum(float(count) for labels, _, count in counts if 'source="redis"' in labels)
    return round(by_redis / sum(float(count) for _, _, count in counts), 3)


def sglang(policy: str) -> System:
    def start(stack: ExitStack, case: Case, options: argparse.Namespace) -> Running:
        urls = [f"http://127.0.0.1:{port}" for port in http_workers(stack, case)]
        port, metrics = free_port(), free_port()
        command = [str(peer(options, "python")), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
        command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "error"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        return behind(stack, command, port)

    return start


def litellm(stack: ExitStack, case: Case, options: argparse.Namespace) -> Running:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-benchmark-")))
    served = [
        {"model": "openai/mock", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "sk-x"}
        for port in http_workers(stack, case)
    ]
    models = [{"model_name": "mock", "litellm_params": each} for each in served]
    config = folder / "litellm.yaml"  # JSON is YAML
    config.write_text(json.dumps({"model_list": models, "router_settings": {"routing_strategy": "simple-shuffle"}}))
    port = free_port()
    command = [str(peer(options, "litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "NO_DOCS": "True",
    }
    return behind(stack, [*command, "--num_workers", "1", "--telemetry", "False"], port, **quiet)


def nginx(stack: ExitStack, case: Case, _: argparse.Namespace) -> Running:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-benchmark-")))
    servers = "".join(f"server 127.0.0.1:{port};" for port in http_workers(stack, case))
    port = free_port()
    places = "".join(f"{kind}_temp_path {folder}/t;" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    proxy = 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;'
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/err;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{ access_log off; {places}\n"
        f"upstream u {{ {servers} keepalive 512; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://u; {proxy} }} }} }}\n"
    )
    return behind(stack, ["nginx", "-c", str(config)], port)


SYSTEMS: dict[str, System] = {
    "tandem": tandem,
    "sglang-round_robin": sglang("round_robin"),
    "sglang-cache_aware": sglang("cache_aware"),
    "litellm": litellm,
    "nginx": nginx,
}


def absent(name: str, options: argparse.Namespace) -> str | None:
    """Why a peer cannot be measured here."""
    if name == "tandem":
        return None
    if name == "nginx":
        return None if shutil.which("nginx") else "nginx is not on PATH"
    package = {"litellm": "litellm"}.get(name, "sglang-router")
    if options.peers_venv is None:
        return f"name a virtual environment that has {package} with --peers-venv or TANDEM_PEERS_VENV"
    found = peer(options, package)
    return None if found.exists() else f"{found} does not exist: {options.peers_venv}/bin/pip install '{package}'"


def peer(options: argparse.Namespace, command: str) -> Path:
    return Path(options.peers_venv) / "bin" / command


def http_workers(stack: ExitStack, case: Case) -> list[int]:
    """Their ports."""
    script = str(Path(__file__).with_name("http_worker.py"))
    step = ["--step-ms", str(case.step_s * 1000)]
    workers = stack.enter_context(process([sys.executable, script, "--workers", str(WORKERS), *step], told=True))
    assert workers.stdout is not None
    ports: list[int] = json.loads(workers.stdout.readline())
    return ports


def behind(stack: ExitStack, command: list[str], port: int, **environment: str) -> Running:
    gateway = stack.enter_context(process(command, cores=GATEWAY_CORES, **environment))
    wait_until_up(gateway, port)
    return Running(port=port, pids=[gateway.pid], expected=lambda text, tokens: letters(text.encode(), tokens))


@contextmanager
def process(
    command: list[str], *, cores: set[int] = OTHER_CORES, told: bool = False, **environment: str
) -> "Iterator[subprocess.Popen[str]]":
    """Killed at the end, with whatever it started. `told`: what it prints is read from `stdout`, else it is a log."""
    path = {"PYTHONPATH": os.pathsep.join(SOURCES)} if command[0] == sys.executable else {}
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if told else log,
            stderr=log,
            text=True,
            env={**os.environ, **path, **environment},
            start_new_session=True,
        )
        # Before it has begun to start threads.
        os.sched_setaffinity(started.pid, cores)
        try:
            yield started
        except Exception:
            log.seek(0)
            print(log.read()[-2000:].decode("utf-8", "replace"), file=sys.stderr)
            raise
        finally:
            os.killpg(started.pid, 9)
            started.communicate()


def wait_until_up(gateway: "subprocess.Popen[str]", port: int) -> None:
    """Raises `TimeoutError`, and `AssertionError` where it has ended."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert gateway.poll() is None, f"{gateway.args} ended with {gateway.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{gateway.args} does not listen on {port} after {START_S} s")


def cpu_seconds(pid: int) -> float:
    """Of a process's threads and its children. The usual clock, of 10 ms, is too coarse for the fastest."""
    tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return own + sum(cpu_seconds(int(child)) for child in children)


async def warmed(running: Running, questions: Sequence[Question]) -> None:
    """Until it answers: a gateway may listen before it knows its workers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            await closed_loop(running.port, questions, at_once=len(questions))
            return
        except (ExceptionGroup, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.3)


async def drive(running: Running, case: Case) -> tuple[Timings, list[float]]:
    """Timings, and CPU seconds of each of its processes."""
    questions = [
        Question.of(number, tokens=case.tokens, stream=case.stream, expected=running.expected)
        for number in range(case.requests)
    ]
    await warmed(running, questions[:8])
    before = [cpu_seconds(pid) for pid in running.pids]
    if case.rate:
        timings = await open_loop(running.port, questions, rate=case.rate)
    else:
        timings = await closed_loop(running.port, questions, at_once=case.clients)
    return timings, [cpu_seconds(pid) - cpu for pid, cpu in zip(running.pids, before, strict=True)]


def measure(start: System, case: Case, options: argparse.Namespace) -> dict[str, float]:
    with ExitStack() as stack:
        running = start(stack, case, options)
        began = time.perf_counter()
        timings, cpu = uvloop.run(drive(running, case))
        work = case.requests * (case.tokens if case.stream else 1)
        unit = "token" if case.stream else "request"
        figures = {
            f"us_per_{unit}": round(sum(cpu) / work * 1e6, 1),
            f"{unit}s_per_core_s": round(work / sum(cpu)),
            "seconds": round(time.perf_counter() - began, 1),
            **timings.figures(),
        }
        if len(cpu) > 1:
            figures[f"us_per_{unit}_in_redis"] = round(cpu[1] / work * 1e6, 1)
        return figures | running.told()


def cases(options: argparse.Namespace, name: str) -> dict[str, Case]:
    # litellm takes a hundred times as long, and its figures are steady.
    less = 4 if name == "litellm" else 1
    step_s = options.step_ms / 1000
    return {
        "whole": Case(clients=16, requests=options.requests // less, tokens=1, stream=False),
        "streamed": Case(
            clients=max(1, options.streams // less),
            requests=max(1, 2 * options.streams // less),
            tokens=options.tokens,
            stream=True,
            step_s=step_s,
        ),
        "latency": Case(
            clients=16, requests=options.requests // less, tokens=1, stream=False, rate=options.rate / (2 * less)
        ),
    }


def run_all(options: argparse.Namespace) -> dict[str, object]:
    names = options.only.split(",") if options.only else list(SYSTEMS)
    missing = {name: why for name in names if (why := absent(name, options)) is not None}
    for name, why in missing.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for name in names:
            if name not in missing:
                for kind, case in cases(options, name).items():
                    told = measure(SYSTEMS[name], case, options)
                    rounds.setdefault(name, {}).setdefault(kind, []).append(told)
                    print(name, kind, told, file=sys.stderr)
    systems = {
        name: {kind: {key: median(each[key] for each in told) for key in told[0]} for kind, told in kinds.items()}
        for name, kinds in rounds.items()
    }
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "systems": systems,
        "absent": missing,
        "tandem_over": ratios(systems),
    }


def ratios(systems: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Requests and tokens per core second of ours, over those of each peer."""
    if "tandem" not in systems:
        return {}
    keys = {"whole": "requests_per_core_s", "streamed": "tokens_per_core_s"}
    return {
        name: {kind: round(systems["tandem"][kind][key] / each[kind][key], 2) for kind, key in keys.items()}
        for name, each in systems.items()
        if name != "tandem"
    }


def run_fleet(redis_url: str, step_s: float, workers: int) -> None:
    tokenizer = mock_tokenizer()
    context = IpcContext()
    handed_over: set[str] = set()
    engines = [
        MockEngine(
            context=context,
            handed_over=handed_over,
            worker_id=f"mock-{number}",
            behaviour=behaviour(tokenizer, step_s=step_s),
            context_length=CONTEXT_LENGTH,
        ).start()
        for number in range(workers)
    ]
    print("ready", flush=True)
    asyncio.run(keep_registered(redis_url, engines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-venv", type=Path, default=os.environ.get("TANDEM_PEERS_VENV"))
    parser.add_argument("--only", help=", ".join(SYSTEMS))
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fleet", nargs=3, help=argparse.SUPPRESS)
    parser.set_defaults(workers=WORKERS)
    options = parser.parse_args()
    if options.fleet is not None:
        run_fleet(options.fleet[0], float(options.fleet[1]), int(options.fleet[2]))
        return
    os.sched_setaffinity(0, OTHER_CORES)
    results = json.dumps(run_all(options), indent=2)
    print(results)
    if options.out is not None:
        options.out.write_text(results + "\n")


if __name__ == "__main__":
    main()
