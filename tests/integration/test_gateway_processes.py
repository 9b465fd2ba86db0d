"""A gateway of several processes, as `tandem gateway --processes` runs it: real Redis, real router, signals."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tandem_services.common.sockets import free_port, listen
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import Fleet, make_record
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 120.0
PROCESSES = 2
REQUESTS = 16
BODY = {"model": "m", "prompt": "hi", "max_tokens": 2}
TANDEM = (sys.executable, "-m", "tandem_services.cli.main")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer.start()
    yield server
    server.stop()


@dataclass
class Running:
    process: "subprocess.Popen[str]"
    port: int
    admin_port: int

    @property
    def pids(self) -> list[int]:
        """Of its processes but the supervisor."""
        own = self.process.pid
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]

    def to(self, port: int) -> httpx.AsyncClient:
        """A client with a new connection for each request: they are what is distributed."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits)


def started(argv: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)


@contextlib.asynccontextmanager
async def gateway(folder: Path, redis: RedisServer, *flags: str) -> AsyncIterator[Running]:
    """Ready, with one worker."""
    port, admin_port = free_port(), free_port()
    argv = [*TANDEM, "gateway", "--model", str(write_tokenizer(folder, config={})), "--served-model-name", "m"]
    argv += ["--port", str(port), "--admin-port", str(admin_port), "--redis-url", redis.url, "--drain-notice", "0"]
    process = started([*argv, "--processes", str(PROCESSES), *flags])
    running = Running(process, port, admin_port)
    try:
        with EngineRack() as rack:
            async with registered(redis, rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.01))):
                async with running.to(admin_port) as admin:
                    await until_all_are_ready(running, admin)
                yield running
    finally:
        process.kill()
        _, log = process.communicate()
    assert "Traceback" not in log


@contextlib.asynccontextmanager
async def registered(redis: RedisServer, engine: MockEngine) -> AsyncIterator[None]:
    fleet = Fleet(redis)
    record = replace(make_record("solo"), view=replace(engine.view, model="m"))

    async def beat() -> None:
        while True:
            with contextlib.suppress(Exception):  # Redis is stopped by one of the tests
                await fleet.beat(record)
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await fleet.close()


async def until_all_are_ready(running: Running, admin: httpx.AsyncClient) -> None:
    """Each process has answered on the API's port, too: those that start have a share of the connections."""

    async def ready() -> bool:
        assert running.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            metrics = (await admin.get("/metrics")).text
            return len(running.pids) == PROCESSES and await ready_processes(running) == PROCESSES and bool(metrics)
        return False

    await until(ready, PATIENCE_S, "all processes are ready")


async def ready_processes(running: Running) -> int:
    """Of some connections, which the kernel distributes: as many as processes where each is ready."""
    async with running.to(running.port) as client:
        try:
            answers = await asyncio.gather(*(client.get("/ready", timeout=2.0) for _ in range(REQUESTS)))
        except httpx.TimeoutException:
            return 0
    return PROCESSES if all(answer.status_code == 200 for answer in answers) else 0


def counted(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("tandem_gateway_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'endpoint="/v1/completions"' in line)


async def test_processes_answer_as_one_gateway(redis, tmp_path):
    async with (
        gateway(tmp_path, redis) as running,
        running.to(running.port) as api,
        running.to(running.admin_port) as admin,
    ):
        names = [f"request-{number}" for number in range(REQUESTS)]
        answers = await asyncio.gather(
            *(api.post("/v1/completions", json=BODY, headers={"x-request-id": name}) for name in names)
        )
        assert [answer.status_code for answer in answers] == [200] * REQUESTS
        for name in names:
            # Whichever process is asked, and whichever had it.
            reported = [await api.get(f"/v1/requests/{name}/explain"), await admin.get(f"/requests/{name}/explain")]
            assert [each.json()["client_request_id"] for each in reported] == [name, name]
        assert (await api.get("/v1/requests/nobodys/explain")).status_code == 404
        assert (await admin.get("/internal/explain")).status_code == 404
        assert (await api.get("/metrics")).status_code == 404
        before = await admin.get("/metrics")
        assert counted(before.text) == REQUESTS
        assert f"tandem_gateway_processes {PROCESSES:.1f}" in before.text.splitlines()
        assert (await admin.get("/v1/models")).json()["data"][0]["id"] == "m"

        os.kill(running.pids[0], signal.SIGKILL)
        assert counted((await admin.get("/metrics")).text) == REQUESTS
        await until_all_are_ready(running, admin)
        later = await asyncio.gather(*(api.post("/v1/completions", json=BODY) for _ in range(REQUESTS)))
        assert [answer.status_code for answer in later] == [200] * REQUESTS
        assert counted((await admin.get("/metrics")).text) == 2 * REQUESTS

        refused = await admin.post("/drain", json={})
        assert refused.status_code == 401
        ordered = await asyncio.to_thread(
            subprocess.run, [*TANDEM, "ctl", f"127.0.0.1:{running.admin_port}", "drain"], check=False
        )
        assert ordered.returncode == 0
        assert await asyncio.to_thread(running.process.wait, PATIENCE_S) == 0


async def test_signal_drains_all_processes_and_keeps_streams(redis, tmp_path):
    body = {**BODY, "max_tokens": 200, "stream": True, "ignore_eos": True}
    begun = asyncio.Semaphore(0)
    async with gateway(tmp_path, redis) as running, running.to(running.port) as api:

        async def stream() -> str:
            async with api.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                begun.release()
                return [line async for line in lines if line][-1]

        streams = [asyncio.create_task(stream()) for _ in range(REQUESTS)]
        for _ in streams:
            await begun.acquire()
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == ["data: [DONE]"] * REQUESTS
        assert await asyncio.to_thread(running.process.wait, PATIENCE_S) == 0


def served_by(pid: int, port: int) -> int:
    """Connections of a process to `port` that are open at both ends."""
    own = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01" and row[1].endswith(f":{port:04X}")]
    return sum(f"socket:[{row[9]}]" in own for row in established)


async def test_killed_process_ends_its_own_streams_alone(redis, tmp_path):
    body = {**BODY, "max_tokens": 400, "stream": True, "ignore_eos": True}
    begun = asyncio.Semaphore(0)
    async with (
        gateway(tmp_path, redis) as running,
        running.to(running.port) as api,
        running.to(running.admin_port) as admin,
    ):

        async def stream() -> str:
            async with api.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                begun.release()
                with contextlib.suppress(httpx.TransportError):
                    return [line async for line in lines if line][-1]
            return "reset"

        await asyncio.gather(*(api.post("/v1/completions", json=BODY) for _ in range(REQUESTS)))
        assert counted((await admin.get("/metrics")).text) == REQUESTS
        streams = [asyncio.create_task(stream()) for _ in range(REQUESTS)]
        for _ in streams:
            await begun.acquire()
        killed = running.pids[0]
        lost = served_by(killed, running.port)
        os.kill(killed, signal.SIGKILL)
        assert counted((await admin.get("/metrics")).text) >= REQUESTS
        ends = Counter(await asyncio.gather(*streams))
        assert ends == Counter({"reset": lost, "data: [DONE]": REQUESTS - lost})
        await until_all_are_ready(running, admin)

        async def all_counted() -> bool:
            return counted((await admin.get("/metrics")).text) == 2 * REQUESTS - lost

        await until(all_counted, PATIENCE_S, "what has ended in the killed process and since is counted")


async def test_processes_grant_one_limit_without_redis(redis, tmp_path):
    keys = write_keys(tmp_path, small={"requests_per_minute": 3}, boss={"admin": True})
    folder = tmp_path / "model"
    folder.mkdir()
    async with gateway(folder, redis, "--api-keys", str(keys)) as running, running.to(running.port) as api:
        redis.kill()
        answers = await asyncio.gather(
            *(api.post("/v1/completions", json=BODY, headers=bearer("small")) for _ in range(2 * REQUESTS))
        )
        granted = [answer.status_code for answer in answers].count(200)
        assert 1 <= granted <= 3
        assert {answer.status_code for answer in answers} <= {200, 429}


def test_port_that_is_taken_is_refused(redis, tmp_path):
    argv = [*TANDEM, "gateway", "--model", str(write_tokenizer(tmp_path, config={})), "--served-model-name", "m"]
    argv += ["--admin-port", str(free_port()), "--redis-url", redis.url, "--processes", "2"]
    with shared_port() as port:
        argv += ["--port", str(port)]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    assert "choose another --host or --port" in ended.stderr


@contextlib.contextmanager
def shared_port() -> Iterator[int]:
    """A port that is listened on by another process, which shares it with any process."""
    with listen("127.0.0.1", 0, shared=True) as listener:
        yield listener.getsockname()[1]
