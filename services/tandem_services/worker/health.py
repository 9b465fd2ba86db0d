"""The worker's own HTTP port, for probes, scraping and operators.

    GET  /live      200 while this process answers and the engine has shown life within `LIVE_S`
    GET  /ready     200 when the router may send requests here, else 503 with the reasons
    GET  /metrics   Prometheus exposition
    GET  /audit     the engine counts its pages; 200 with the report, 504 when it does not answer
    GET  /links     the links to peers, as the engine has measured them
    POST /drain     202; the worker takes no new requests, moves running ones to others, and exits 0
    POST /offer     200; a worker on standby is offered to the router from now on; 409 while the model is loaded
    POST /hold      200; a worker on standby is being tried, and does not offer itself meanwhile
    POST …          an operator's orders; see `operator_routes`

The first three are for everybody who reaches the port. The rest needs the order token (`common.order_access`), from
this machine too, unless `--allow-remote-orders` says that it needs none.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.addresses import LOOPBACK, Address, is_wildcard
from tandem_engine.messages.control import AuditReport
from tandem_engine.messages.engine_stats import LinkReport
from tandem_services.common.health import Health
from tandem_services.common.listening import listen
from tandem_services.common.metrics import CONTENT_TYPE, render
from tandem_services.common.order_access import OrderAccess
from tandem_services.common.order_token import TokenFile
from tandem_services.worker.operator_routes import BUSY, Operate, SetRole, json_response, operator_routes
from tandem_services.worker.order_guard import OrderGuard

LIVE_S = 30.0
"""An engine that shows no life for this long will not recover by itself: /live fails and Kubernetes restarts
the pod. Long against `load.STALL_S`, after which it is only not offered."""

OPEN_PATHS = frozenset({"/live", "/ready", "/metrics"})


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
    offer: Callable[[], str | None]
    """End the standby; what is in its way, or None."""
    hold: Callable[[], None]
    """Somebody tries it."""
    order_access: OrderAccess


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
        return Response(await render(probes.registry), media_type=CONTENT_TYPE)

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

    async def offer(request: Request) -> Response:
        del request
        refusal = probes.offer()
        if refusal is not None:
            return json_response({"code": BUSY, "message": refusal}, 409)
        return json_response({"message": "offered to the router"})

    async def hold(request: Request) -> Response:
        del request
        probes.hold()
        return json_response({"message": "stands by while it is tried"})

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/audit", audit),
            Route("/links", links),
            Route("/drain", drain, methods=["POST"]),
            Route("/offer", offer, methods=["POST"]),
            Route("/hold", hold, methods=["POST"]),
            *operator_routes(probes.operate, probes.set_role),
        ],
        middleware=[Middleware(OrderGuard, open_paths=OPEN_PATHS, access=probes.order_access)],
    )


class HealthServer(uvicorn.Server):
    """Serves the probes on a port of its own. Signals are the worker's business."""

    def __init__(self, app: Starlette, host: str, port: int, *, advertised: str = LOOPBACK, token: str = "") -> None:
        """Serves `app`. Binds at once. `advertised` is where others find it when `host` stands for all addresses.
        `token`: of its orders, which is in a file while it serves; "" where it takes none.

        Raises `StartupError` when the address is taken or not ours.
        """
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                log_level="warning",
                server_header=False,
                # Who gives orders is known by the connection, not by a header.
                proxy_headers=False,
                ws="none",
            )
        )
        self._serving = False
        self._listener = listen(host, port, flags="--health-host or --health-port")
        bound = Address(host, self._listener.getsockname()[1])
        self.endpoint = Address(advertised if is_wildcard(host) else host, bound.port).url()
        self._token_file = TokenFile(token=token, address=bound, also=advertised) if token else None

    async def run_until_closed(self) -> None:
        self._serving = True
        if self._token_file is None:
            await self.serve(sockets=[self._listener])
            return
        self._token_file.write()
        try:
            await self.serve(sockets=[self._listener])
        finally:
            self._token_file.remove()

    def close(self) -> None:
        """End `run_until_closed`, which closes the port; or close it here when it was never served."""
        self.should_exit = True
        if not self._serving:
            self._listener.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
