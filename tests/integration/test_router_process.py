"""`tandem router` as a process: it starts, serves, and ends by a signal; what it cannot start with is one sentence."""

import signal
import socket
import subprocess
import sys
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem_services.common.sockets import free_port
from tandem_testing.redis_server import RedisServer
from tandem_testing.tokenizer_builders import write_tokenizer

PROGRAM = (sys.executable, "-m", "tandem_services.cli.main", "router")


def start(server: RedisServer, *flags: str) -> "subprocess.Popen[str]":
    argv = [*PROGRAM, "--redis-url", server.url, *flags]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def wait_until_live(process: "subprocess.Popen[str]", url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"{url}/live", timeout=60).status_code == 200
        except httpx.TransportError:
            assert process.poll() is None, "the router ended"
            time.sleep(0.1)
        else:
            return
    process.kill()
    raise AssertionError("the router did not come up")


@pytest.fixture
def model(tmp_path):
    folder = write_tokenizer(tmp_path / "m")
    (folder / "config.json").write_text("{}")
    return folder


def test_router_serves_both_ports_and_signal_ends_it(server, model):
    http, rpc = free_port(), free_port()
    flags = ("--model", f"named={model}", "--port", str(http), "--grpc-port", str(rpc), "--drain-notice", "0")
    with start(server, *flags) as process:
        wait_until_live(process, f"http://127.0.0.1:{http}")
        body = {"model": "named", "prompt": "hello"}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/choose", json=body, timeout=60)
        assert answer.status_code == 503
        with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel:
            ask = health_pb2.HealthCheckRequest(service="liveness")
            assert health_pb2_grpc.HealthStub(channel).Check(ask, timeout=60).status == 1
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_port_in_use_error_names_its_flag(server, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(server, "--model", str(model), "--port", str(free_port()), "--grpc-port", port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "--grpc-port" in errors
    assert "Traceback" not in errors
