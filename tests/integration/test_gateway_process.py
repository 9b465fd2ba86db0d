"""A gateway process as `serve` runs it: real Redis, real router, signals."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import httpx
import pytest

from tandem_services.common.sockets import free_port
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import Fleet, make_record
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until, wait_for

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 120.0
get, post = partial(httpx.get, timeout=PATIENCE_S), partial(httpx.post, timeout=PATIENCE_S)
LONG_NOTICE_S = 6.0
"""Of an end: long enough for requests during it, however late."""
PROGRAM = """
import sys
from pathlib import Path
from tandem_services.common.redis_client import RedisAddress
from tandem_services.gateway.serve import GatewayConfig, ModelConfig, serve
folder, port, redis, notice_s = sys.argv[1:]
model = ModelConfig(path=Path(folder), names=("m",), redis=RedisAddress(url=redis))
sys.exit(serve(GatewayConfig(models=(model,), port=int(port), drain_notice_s=float(notice_s))))
"""


@pytest.fixture
def redis():
    server = RedisServer.start()
    yield server
    server.stop()


def start(folder, port: int, redis_url: str, *, notice_s: float = 1.0, descriptors: int = 0) -> "subprocess.Popen[str]":
    """`descriptors`: the limit of open files, if it is not this process's."""
    argv = [sys.executable, "-c", PROGRAM, str(folder), str(port), redis_url, str(notice_s)]
    if descriptors:
        argv = ["prlimit", f"--nofile={descriptors}:{descriptors}", *argv]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def wait_until_live(url: str) -> None:
    def live() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return get(f"{url}/live").status_code == 200
        return False

    wait_for(live, PATIENCE_S, lambda: "the gateway did not come up")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_gateway_cleanly(redis, tmp_path, number):  # [drain-loses-nothing]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(write_tokenizer(tmp_path), port, redis.url)
    try:
        wait_until_live(url)
        answer = get(f"{url}/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        refused = post(f"{url}/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        process.send_signal(number)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def registered(redis: RedisServer, engine: MockEngine, **details: int) -> AsyncIterator[None]:
    """Heartbeats for a mock engine, as its worker would send them, with `details` for people."""
    fleet = Fleet(redis)
    record = replace(make_record("solo"), view=replace(engine.view, model="m"), details=details)

    async def beat() -> None:
        while True:
            await fleet.beat(record)
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await fleet.close()


async def wait_until_ready(client: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get("/ready")).status_code == 200
        return False

    await until(ready, PATIENCE_S, "the gateway is ready")


async def test_draining_gateway_turns_unready_first_and_keeps_streams(redis, tmp_path):
    port = free_port()
    process = start(write_tokenizer(tmp_path), port, redis.url, notice_s=LONG_NOTICE_S)
    body = {"model": "m", "prompt": "hi", "max_tokens": 300, "stream": True, "ignore_eos": True}
    running = asyncio.Semaphore(0)
    try:
        with EngineRack() as rack:
            engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.01))
            async with (
                registered(redis, engine),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
            ):
                await wait_until_ready(client)

                async def stream() -> str:
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        lines = response.aiter_lines()
                        await anext(lines)
                        running.release()
                        return [line async for line in lines if line][-1]

                streams = [asyncio.create_task(stream()) for _ in range(16)]
                for _ in streams:
                    await running.acquire()
                process.send_signal(signal.SIGTERM)
                answer = await client.get("/ready")
                while answer.status_code == 200:
                    answer = await client.get("/ready")
                # Its status shows it, not a closed port, and it still serves clients that have not seen that.
                assert (answer.status_code, answer.json()["status"]) == (503, "draining")
                assert answer.headers["connection"] == "close"
                late = await client.post("/v1/completions", json={**body, "stream": False, "max_tokens": 1})
                assert late.status_code == 200
                assert await asyncio.gather(*streams) == ["data: [DONE]"] * 16
                assert await asyncio.to_thread(process.wait, 60) == 0
                with pytest.raises(httpx.ConnectError):
                    await client.get("/ready")
        log = process.stderr.read()
        assert "Traceback" not in log
        # Those of the streams were written in the last moments of the process.
        assert log.count("request finished") == len(streams) + 1
    finally:
        process.kill()
        process.communicate()


async def test_streams_wait_when_descriptors_are_short(redis, tmp_path):
    port, clients = free_port(), 300
    process = start(write_tokenizer(tmp_path), port, redis.url, descriptors=128)
    body = {"model": "m", "prompt": "hi", "max_tokens": 100, "stream": True, "ignore_eos": True}
    limits = httpx.Limits(max_connections=clients)
    try:
        with EngineRack() as rack:
            engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.01))
            url = f"http://127.0.0.1:{port}"
            async with registered(redis, engine):
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as first:
                    await wait_until_ready(first)
                # A client without a connection that waits for its next request: the gateway may end one for others.
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:

                    async def stream() -> str:
                        async with client.stream("POST", "/v1/completions", json=body) as response:
                            return [line async for line in response.aiter_lines() if line][-1]

                    assert await asyncio.gather(*(stream() for _ in range(clients))) == ["data: [DONE]"] * clients
    finally:
        process.kill()
        _, log = process.communicate()
    assert "few file descriptors are left (limit 128)" in log


async def test_console_shows_worker_statistics_and_redis_outage(redis, tmp_path):
    port = free_port()
    process = start(write_tokenizer(tmp_path), port, redis.url)
    reported = {"running": 3, "evictable_pages": 40, "cached_tokens_total": 7}
    try:
        with EngineRack() as rack:
            engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                async with registered(redis, engine, **reported):
                    await wait_until_ready(client)
                    fleet = (await client.get("/console/data/fleet")).json()
                    worker = fleet["workers"][0]
                    assert (worker["worker_id"], worker["state"], fleet["redis"]) == ("solo", "ready", "answering")
                    assert {name: worker["figures"][name] for name in reported} == reported
                redis.kill()
                while fleet["redis"] == "answering":
                    await asyncio.sleep(0.1)
                    fleet = (await client.get("/console/data/fleet")).json()
                assert fleet["view_age_s"] >= 3.0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()


def test_gateway_start_waits_for_redis_and_logs_it(tmp_path):  # [redis-is-optional]
    server = RedisServer.start()
    server.kill()
    port = free_port()
    process = start(write_tokenizer(tmp_path), port, server.url)
    try:
        assert f"waiting for Redis at {server.url}" in process.stderr.readline()
        server.restart()
        wait_until_live(f"http://127.0.0.1:{port}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
        server.stop()


def test_admin_port_serves_during_api_and_drains_it(redis, tmp_path):
    port, admin = free_port(), free_port()
    flags = ["--api-keys", str(write_keys(tmp_path, ann={}, root={"admin": True})), "--admin-port", str(admin)]
    flags += ["--redis-url", redis.url, "--port", str(port), "--drain-notice", str(LONG_NOTICE_S)]
    argv = [sys.executable, "-m", "tandem_services.cli.main", "gateway", *flags]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    api, administration = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
    try:
        wait_until_live(api)
        wait_until_live(administration)
        assert get(f"{api}/v1/models").status_code == 401
        assert get(f"{api}/v1/models", headers=bearer("ann")).status_code == 200
        assert get(f"{api}/metrics", headers=bearer("root")).status_code == 404
        assert "tandem_gateway_requests_total" in get(f"{administration}/metrics").text
        assert get(f"{administration}/console").status_code == 200
        assert get(f"{api}/console", headers=bearer("root")).status_code == 404
        fleet = get(f"{administration}/console/data/fleet", headers=bearer("root")).json()
        assert (fleet["workers"], fleet["redis"]) == ([], "answering")
        assert post(f"{administration}/drain", json={}, headers=bearer("ann")).status_code == 403
        assert post(f"{administration}/drain", json={}, headers=bearer("root")).status_code == 202
        assert get(f"{api}/ready").json()["status"] == "draining"
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_missing_key_file_fails_gateway_start(tmp_path):  # [key-file-refused]
    flags = ["--api-keys", str(tmp_path / "none.json"), "--redis-url", "redis://127.0.0.1:1"]
    argv = [sys.executable, "-m", "tandem_services.cli.main", "gateway", *flags]
    ended = subprocess.run(
        [*argv, "--port", str(free_port())], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert "--api-keys" in ended.stderr
    assert "none.json: No such file" in ended.stderr
    assert "Traceback" not in ended.stderr
