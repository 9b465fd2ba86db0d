"""Entry point of a worker: signals, exit status, and the order of opening and closing.

`run_worker` also starts the follower nodes of an engine on several machines (`tandem worker` with `--node-rank` above
0). A `FollowerService` registers nowhere and serves no requests: for gateways and routers, the worker is node 0.

    start    health port → `tandem-engine follow`, which joins node 0 and starts the ranks of this machine
    run      /ready while those ranks take part in the engine's steps; /live while their process and node 0 answer
    drain    SIGTERM: requests a drain from node 0, which migrates its requests and ends the engine; this node ends
             with it
    exit     with the status of the ranks' process, so that the pod controller restarts the group
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.errors import ConfigError, WireError
from tandem_engine.base.thread_pools import start_background_threads
from tandem_engine.ipc.async_channels import AsyncPairServer
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.ipc.private_tmpdir import own_folder
from tandem_engine.messages.control import EngineFailed, EngineToWorker, NodeReport, Shutdown, WorkerToEngine
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, new_registry, render
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import ending_signals
from tandem_services.common.tracing import require_opentelemetry
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.engine_process import EngineChild, node_argv
from tandem_services.worker.http_api import LIVE_S, HealthServer, json_response
from tandem_services.worker.service import EXIT_FAILED, WorkerService

logger = logging.getLogger(__name__)

END_GRACE_S = 15.0
"""From the end of the worker's drain until its engine has reported its own end."""


@dataclass(kw_only=True, slots=True)
class NodeState:
    """What the probes ask."""

    clock: Clock
    serving: bool = False
    reported_at: float | None = None
    health: Health = field(default_factory=Health)

    def __post_init__(self) -> None:
        self.health.add_check("ranks", lambda: None if self.serving else "waiting for node 0 and its ranks")
        self.health.add_check("node-0", lambda: f"silent for {self.silent_s:.0f} s" if self.silent_s > LIVE_S else None)

    @property
    def silent_s(self) -> float:
        """Since the last sign of life, 0 before the first."""
        return 0.0 if self.reported_at is None else self.clock.now() - self.reported_at

    def on_report(self, report: NodeReport) -> None:
        self.reported_at = self.clock.now()
        self.serving = report.serving


def build_node_app(state: NodeState, registry: CollectorRegistry) -> Starlette:
    """GET /live, /ready and /metrics, as on a worker. There are no commands."""

    async def live(request: Request) -> Response:
        del request
        if state.silent_s > LIVE_S:
            return json_response({"status": "stalled", "stalled_s": round(state.silent_s, 1)}, 503)
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        del request
        report = state.health.report()
        return json_response(report, report.http_status)

    async def metrics(request: Request) -> Response:
        del request
        return Response(await render(registry), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/live", live), Route("/ready", ready), Route("/metrics", metrics)])


class FollowerService:
    """One start of one following machine. `run` once."""

    def __init__(self, config: WorkerConfig, context: IpcContext, folder: Path, clock: Clock) -> None:
        self.state = NodeState(clock=clock)
        self._config = config
        self._endpoint = f"ipc://{folder}/control"
        self._channel: AsyncPairServer[EngineToWorker, WorkerToEngine] = AsyncPairServer(
            context, self._endpoint, inbound=EngineToWorker, outbound=WorkerToEngine
        )
        self._leaving = asyncio.Event()
        self._health_server = HealthServer(
            build_node_app(self.state, new_registry()), config.health_host, config.health_port, advertised=config.host
        )

    def leave(self) -> None:
        """Have the engine drained and ended; this ends with it."""
        self.state.health.drain()
        self._leaving.set()

    async def run(self) -> int:
        """Until the ranks' process has ended; returns its exit status, 1 for a signal.

        Raises `StartupError` when it cannot be started at all.
        """
        child = await EngineChild.start(node_argv(self._config, control=self._endpoint))
        works = (self._health_server.run_until_closed(), self._follow_reports(), self._end(child))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            status = await child.wait()
            log = logger.info if status == 0 else logger.error
            log("node %d exits: its ranks' process exited with status %d", self._config.node_rank, status)
            return status if status >= 0 else 1
        finally:
            self._health_server.close()
            await _cancelled(tasks[1:])
            await tasks[0]
            self._channel.close()

    async def _follow_reports(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except WireError as error:
                logger.warning("ignored a malformed message of the ranks' process: %s", error)
                continue
            if isinstance(message, NodeReport):
                self.state.on_report(message)
            elif isinstance(message, EngineFailed):
                logger.error("node %d failed (%s): %s", self._config.node_rank, message.code, message.message)

    async def _end(self, child: EngineChild) -> None:
        """After a shutdown request: by message, and by signals when the engine takes longer than its drain may."""
        await self._leaving.wait()
        logger.info("node %d requests a drain from node 0", self._config.node_rank)
        await self._channel.send(Shutdown())
        await child.stop(grace_s=self._config.drain_timeout_s + END_GRACE_S)


async def _cancelled(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


EXIT_USAGE = 2


def run_worker(config: WorkerConfig) -> int:
    """Run one worker, or a follower node, until it is drained or cannot continue; returns the exit status.

    0 drained · 1 failed, restart it · 2 a flag cannot work · 3 the engine refused model or flags
    """
    try:
        if config.tracing is not None:
            require_opentelemetry()
        keys = KeyPair.load(config.curve_keys) if config.curve_keys is not None else None
        return asyncio.run(_run(config, keys))
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except (RedisUnavailableError, StartupError) as error:
        logger.error("%s", error)
        return EXIT_FAILED


async def _run(config: WorkerConfig, keys: KeyPair | None) -> int:
    await start_background_threads()
    context = IpcContext(keys)
    try:
        # No other process may send on the control channel.
        with own_folder("tandem-worker-") as folder:
            if config.node_rank > 0:
                follower = FollowerService(config, context, folder, MonotonicClock())
                _on_signals(follower.leave)
                return await follower.run()
            service = WorkerService(config, context, folder, MonotonicClock())
            _on_signals(service.drain)
            return await service.run()
    finally:
        context.close()


def _on_signals(end: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, end)
