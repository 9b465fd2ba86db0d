"""A machine that computes for the worker on another one: its probes, its leave, and its end."""

import asyncio
import sys

import httpx
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import NodeReport
from tandem_services.common.metrics import new_registry
from tandem_services.common.redis_client import RedisAddress
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.engine_process import node_argv
from tandem_services.worker.http_api import LIVE_S
from tandem_services.worker.main import FollowerService, NodeState, build_node_app
from tandem_testing.waiting import until

PATIENCE_S = 60.0
NODE_PROCESS = """
import os, sys
from tandem_engine.ipc.channels import IpcContext, PairChannel
from tandem_engine.messages.control import EngineToWorker, NodeReport, Shutdown, WorkerToEngine
endpoint = sys.argv[sys.argv.index("--control") + 1]
control = PairChannel(IpcContext(), endpoint, inbound=WorkerToEngine, outbound=EngineToWorker)
control.send(NodeReport(node_rank=1, serving=True))
while True:
    control.socket.poll(60_000)
    if any(isinstance(order, Shutdown) for order in control.receive()):
        os._exit({status})
"""


class Time:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def config(**changes) -> WorkerConfig:
    fields = {
        "model_path": "/nowhere",
        "model_name": "mini",
        "role": Role.DECODE,
        "worker_id": "w1",
        "redis": RedisAddress(url="redis://127.0.0.1:1"),
        "node_rank": 1,
    }
    return WorkerConfig(**{**fields, **changes})


async def test_follower_is_ready_if_serving_and_live_while_reporting():
    time = Time()
    state = NodeState(clock=time)
    transport = httpx.ASGITransport(app=build_node_app(state, new_registry()))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:

        async def statuses() -> tuple[int, int]:
            return (await client.get("/live")).status_code, (await client.get("/ready")).status_code

        time.time = 10 * LIVE_S
        assert await statuses() == (200, 503)  # it waits for node 0, which may take its time
        state.on_report(NodeReport(node_rank=1, serving=False))
        assert await statuses() == (200, 503)
        state.on_report(NodeReport(node_rank=1, serving=True))
        assert await statuses() == (200, 200)
        time.time += LIVE_S + 1
        assert await statuses() == (503, 503)
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/drain")).status_code == 404


@pytest.mark.parametrize("status", [0, 3])
async def test_follower_that_leaves_returns_engine_exit_status(tmp_path, status):
    program = NODE_PROCESS.replace("{status}", str(status))
    context = IpcContext()
    service = FollowerService(config(node_command=(sys.executable, "-c", program)), context, tmp_path, MonotonicClock())
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: service.state.serving, PATIENCE_S, "ranks that follow")
        service.leave()
        assert not service.state.health.report().ok
        assert await running == status
    context.close()


def test_rank_process_gets_flags_of_the_worker():
    argv = node_argv(config(host="10.0.0.8", engine_flags=("--nnodes", "2")), control="ipc:///c")
    assert argv[-2:] == ["--nnodes", "2"]
    assert argv[3:] == [
        "follow",
        *("--model", "/nowhere", "--role", "decode", "--host", "10.0.0.8", "--control", "ipc:///c"),
        *("--log-format", "plain", "--nnodes", "2"),
    ]
