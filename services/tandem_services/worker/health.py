"""The worker's own HTTP port, for probes, scraping and operators.

    GET  /live      200 while this process answers and the engine has shown life within `LIVE_S`
    GET  /ready     200 when the router may send requests here, else 503 with the reasons
    GET  /metrics   Prometheus exposition
    GET  /audit     the engine counts its pages; 200 with the report, 504 when it does not answer
    GET  /links     the links to peers, as the engine has measured them
    POST /drain     202; the worker takes no new requests, moves running ones to others, and exits 0
    POST …          an operator's orders; see `operator_routes`

Bound to loopback unless told otherwise: all but the first three are for whoever runs the worker.
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.messages.control import AuditReport, LinkReport
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, render
from tandem_services.worker.operator_routes import Operate, SetRole, json_response, operator_routes

LIVE_S = 30.0
"""An engine that shows no life for this long will not recover by itself: /live fails and Kubernetes restarts
the pod. Long against `load.STALL_S`, after which it is only not offered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProbes:
    """What the endpoints ask."""

    health: Health
    registry: CollectorRegistry
    stalled_s: Callable[[], float]
    links: Callable[[], tuple[LinkReport, ...]]
    audit: Callable[[], Awaitable[AuditReport]]
    drain: Callable[[], None]
    operate: Operate
    set_role: SetRole


def build_app(probes: WorkerProbes) -> Starlette:
    """The routes of the module docstring."""

    async def live(request: Request) -> Response:
        del request
        stalled = probes.stalled_s()
        if stalled > LIVE_S:
            return json_response({"status": "stalled", "stalled_s": round(stalled, 1)}, 503)
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        del request
        report = probes.health.report()
        return json_response(report, report.http_status)

    async def metrics(request: Request) -> Response:
        del request
        return Response(render(probes.registry), media_type=CONTENT_TYPE)

    async def audit(request: Request) -> Response:
        del request
        try:
            return json_response(await probes.audit())
        except TimeoutError:
            return json_response({"status": "the engine did not answer the audit"}, 504)

    async def links(request: Request) -> Response:
        del request
        return json_response({"links": probes.links()})

    async def drain(request: Request) -> Response:
        del request
        probes.drain()
        return json_response({"status": "draining"}, 202)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/audit", audit),
            Route("/links", links),
            Route("/drain", drain, methods=["POST"]),
            *operator_routes(probes.operate, probes.set_role),
        ]
    )


class HealthServer(uvicorn.Server):
    """Serves the probes on a port of its own. Signals are the worker's business."""

    def __init__(self, probes: WorkerProbes, host: str, port: int) -> None:
        """Binds at once. Raises `StartupError` when the address is taken or not ours."""
        super().__init__(
            uvicorn.Config(
                build_app(probes),
                log_config=None,
                access_log=False,
                lifespan="off",
                log_level="warning",
                server_header=False,
                ws="none",
            )
        )
        self._serving = False
        self._listener = _listen(host, port)
        self.endpoint = f"http://{host}:{self._listener.getsockname()[1]}"

    async def run_until_closed(self) -> None:
        self._serving = True
        await self.serve(sockets=[self._listener])

    def close(self) -> None:
        """End `run_until_closed`, which closes the port; or close it here when it was never served."""
        self.should_exit = True
        if not self._serving:
            self._listener.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port} ({error}): choose another --health-host or --health-port"
        ) from error
    listener.listen(64)
    return listener
