"""What clients of a gateway get that ends before their answers do: signals to a real process."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from tests.integration.test_gateway_process import PATIENCE_S, registered, wait_until_ready

from tandem_services.common.sockets import free_port
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

HI = [{"role": "user", "content": "hi"}]
LONG = 400
STREAMS = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": LONG, "ignore_eos": True},
    "/v1/completions": {"prompt": "hi", "max_tokens": LONG, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": LONG},
    "/v1/messages": {"messages": HI, "max_tokens": LONG},
}
MESSAGE = "The gateway is shutting down. Send the request again."


@pytest.fixture
def redis():
    server = RedisServer.start()
    yield server
    server.stop()


def start(folder, port: int, redis_url: str, *, drain_s: float, hang_up_ignored: bool = False) -> subprocess.Popen[str]:
    flags = ["--model", str(write_tokenizer(folder, config={})), "--served-model-name", "m", "--redis-url", redis_url]
    flags += ["--port", str(port), "--drain-notice", "0.1", "--drain-timeout", str(drain_s)]
    argv = [sys.executable, "-m", "tandem_services.cli.main", "gateway", *flags]
    disposition = signal.SIG_IGN if hang_up_ignored else signal.SIG_DFL
    program = ["import os, signal, sys", f"signal.signal(signal.SIGHUP, signal.{disposition.name})"]
    program.append("os.execv(sys.argv[1], sys.argv[1:])")
    return subprocess.Popen([sys.executable, "-c", "\n".join(program), *argv], stderr=subprocess.PIPE, text=True)


def check_end(path: str, lines: list[str]) -> None:
    """The error is the last event, and after it comes what ends a stream of its kind."""
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert lines[-1] == "data: [DONE]"
        lines = lines[:-1]
    last = json.loads(lines[-1].removeprefix("data: "))
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == MESSAGE
    if path == "/v1/messages":
        assert (lines[-2], last["type"]) == ("event: error", "error")
    if path == "/v1/responses":
        assert (lines[-2], last["response"]["status"]) == ("event: response.failed", "failed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_gateway_shutdown_gives_each_stream_its_error(redis, tmp_path, number):
    port = free_port()
    process = start(tmp_path, port, redis.url, drain_s=0.5)
    try:
        with EngineRack() as rack:
            engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.1))
            url = f"http://127.0.0.1:{port}"
            async with registered(redis, engine), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                await wait_until_ready(client)
                running = asyncio.Semaphore(0)

                async def stream(path: str) -> list[str]:
                    body = {"model": "m", "stream": True, **STREAMS[path]}
                    async with client.stream("POST", path, json=body) as response:
                        assert response.status_code == 200, await response.aread()
                        lines = response.aiter_lines()
                        await anext(lines)
                        running.release()
                        return [line async for line in lines if line]

                async def whole() -> httpx.Response:
                    return await client.post("/v1/completions", json={"model": "m", **STREAMS["/v1/completions"]})

                streams = {path: asyncio.create_task(stream(path)) for path in STREAMS}
                async with asyncio.timeout(PATIENCE_S):
                    for _ in streams:
                        await running.acquire()
                unstreamed = asyncio.create_task(whole())
                everything = len(STREAMS) + 1
                await until(lambda: len(engine.received) == everything, PATIENCE_S, "the engine has every request")
                process.send_signal(number)
                for path, lines in streams.items():
                    check_end(path, await lines)
                answer = await unstreamed
                assert (answer.status_code, answer.json()["error"]["message"]) == (503, MESSAGE)
                assert answer.headers["retry-after"] == "1"
                assert await asyncio.to_thread(process.wait, 60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


async def test_gateway_under_nohup_outlives_its_terminal(redis, tmp_path):
    port = free_port()
    process = start(tmp_path, port, redis.url, drain_s=0.5, hang_up_ignored=True)
    try:
        with EngineRack() as rack:
            engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
            url = f"http://127.0.0.1:{port}"
            async with registered(redis, engine), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                await wait_until_ready(client)
                os.kill(process.pid, signal.SIGHUP)
                answer = await client.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 1})
                assert (answer.status_code, (await client.get("/ready")).status_code) == (200, 200)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()
