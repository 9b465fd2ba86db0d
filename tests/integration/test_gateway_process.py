"""A gateway process as `serve` runs it: real Redis, real router, signals."""

import signal
import subprocess
import sys
import time

import httpx
import pytest

from tandem_testing.redis_server import REDIS_SERVER, RedisServer, free_port
from tandem_testing.tokenizer_builders import write_tokenizer

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PROGRAM = """
import sys
from pathlib import Path
from tandem_services.gateway.serve import GatewayConfig, serve
folder, port, redis = sys.argv[1:]
sys.exit(serve(GatewayConfig(model_path=Path(folder), model_name="m", port=int(port), redis_url=redis)))
"""


@pytest.fixture
def redis():
    server = RedisServer.start()
    yield server
    server.stop()


def start(folder, port: int, redis_url: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", PROGRAM, str(folder), str(port), redis_url]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def wait_until_live(url: str) -> None:
    for _ in range(300):
        try:
            assert httpx.get(f"{url}/live").status_code == 200
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the gateway did not come up")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_gateway_cleanly(redis, tmp_path, number):  # B3.36
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(write_tokenizer(tmp_path), port, redis.url)
    try:
        wait_until_live(url)
        answer = httpx.get(f"{url}/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        process.send_signal(number)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
