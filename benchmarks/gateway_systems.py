"""Gateways that are measured beside each other, each started in front of mock workers of its own. Not a command.

Ours is `tandem gateway` with its router and Redis, and its workers speak the protocol of our engines; those of others
speak OpenAI's over HTTP. Peers are found in the virtual environment `options.peers_venv`, nginx on PATH.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from chat_load import letters
from mock_fleet import expected_answer, mock_checkpoint, mock_tokenizer
from pinned_processes import GATEWAY_CORES, OTHER_CORES, process, wait_until_up

from tandem_services.common.sockets import free_port
from tandem_testing.redis_server import RedisServer

WORKERS = 4
HERE = Path(__file__).resolve().parent


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
    own_figures: Callable[[], dict[str, float]] = dict
    """Figures that it has of itself."""


System = Callable[[ExitStack, Case, argparse.Namespace], Running]


def tandem(stack: ExitStack, case: Case, options: argparse.Namespace) -> Running:
    redis = RedisServer.start()
    stack.callback(redis.stop)
    assert redis.process is not None
    os.sched_setaffinity(redis.process.pid, OTHER_CORES)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-benchmark-")))
    mock_checkpoint(folder)
    fleet_of = [redis.url, str(case.step_s), str(options.workers)]
    fleet = stack.enter_context(process([sys.executable, str(HERE / "mock_fleet.py"), *fleet_of], piped=True))
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
        own_figures=lambda: {"share_routed_by_redis": share_routed_by_redis(port)},
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
    script = str(HERE / "http_worker.py")
    step = ["--step-ms", str(case.step_s * 1000)]
    workers = stack.enter_context(process([sys.executable, script, "--workers", str(WORKERS), *step], piped=True))
    assert workers.stdout is not None
    ports: list[int] = json.loads(workers.stdout.readline())
    return ports


def behind(stack: ExitStack, command: list[str], port: int, **environment: str) -> Running:
    gateway = stack.enter_context(process(command, cores=GATEWAY_CORES, **environment))
    wait_until_up(gateway, port)
    return Running(port=port, pids=[gateway.pid], expected=lambda text, tokens: letters(text.encode(), tokens))
