"""The operator's own HTTP port: /livez, /readyz, /metrics, and /scaling/NAMESPACE/SERVICE/ROLE for KEDA."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem_engine.base.addresses import EVERY_ADDRESS, Address, AddressError, family_of
from tandem_operator.telemetry.external import ScalingMetrics


class PortTakenError(Exception):
    """The sentence names the port and what to do."""


Health = Callable[[], str]
"""Why not; empty when all is well."""

Scaling = Callable[[str, str, str], tuple[int, dict[str, float | str]]]
"""Namespace, service, role → status and JSON."""


def probe_app(registry: CollectorRegistry, live: Health, ready: Health, scaling: Scaling) -> web.Application:
    """`live`: whether a restart would help; `ready`: whether it has listed the cluster, leader or not."""

    async def livez(_: web.Request) -> web.Response:
        return _answer(live())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def figures(request: web.Request) -> web.Response:
        named = request.match_info
        status, document = scaling(named["namespace"], named["service"], named["role"])
        return web.json_response(document, status=status)

    app = web.Application()
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/scaling/{namespace}/{service}/{role}", figures)
    return app


def _answer(error: str) -> web.Response:
    return web.Response(status=503 if error else 200, text=f"{error or 'ok'}\n")


@asynccontextmanager
async def serving(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serves for as long as the block lasts; the port, which is chosen for 0. Raises `PortTakenError`."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            address = Address(host, port)
            listener = _listener(address)
        except AddressError as error:
            raise PortTakenError(f"{error}; choose another --http-host") from error
        except OSError as error:
            raise PortTakenError(f"{address}: {error.strerror}; choose another --http-port") from error
        await web.SockSite(runner, listener).start()
        yield listener.getsockname()[1]
    finally:
        await runner.cleanup()


def _listener(address: Address) -> socket.socket:
    """At all addresses of both families for `EVERY_ADDRESS`, where the kernel has IPv6. Raises `OSError`."""
    host = address.host
    both = host == EVERY_ADDRESS and socket.has_dualstack_ipv6()
    if host == EVERY_ADDRESS and not both:
        host = "0.0.0.0"  # noqa: S104 - as the user has asked
    return socket.create_server((host, address.port), family=family_of(host), dualstack_ipv6=both)


RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """All series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "tandem_operator_reconciles",
            "Reconciliations of a ModelService, by result: unchanged, changed, failed, stopped (leadership was lost)",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "tandem_operator_reconcile_seconds",
            "Duration of a reconciliation, writes included",
            buckets=RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self.api_writes = Counter(
            "tandem_operator_api_writes",
            "Write requests to the API server",
            ["verb", "kind"],
            registry=self.registry,
        )
        self.errors = Counter(
            "tandem_operator_errors", "Failures, by component", ["part", "reason"], registry=self.registry
        )
        self.leader = Gauge("tandem_operator_leader", "1 while this operator is the leader", registry=self.registry)
        self.queue = Gauge(
            "tandem_operator_queue_length", "Services that wait for a reconciliation", registry=self.registry
        )
        self.services = Gauge("tandem_operator_services", "Known ModelServices", registry=self.registry)
        self.scaling = ScalingMetrics()
        """Of services that others scale."""
        self.registry.register(self.scaling)
        self.watch_events = Counter(
            "tandem_operator_watch_events", "Watch events received", ["kind"], registry=self.registry
        )

    def wrote(self, verb: str, kind: str) -> None:
        """A request that changes something was sent."""
        self.api_writes.labels(verb, kind).inc()
