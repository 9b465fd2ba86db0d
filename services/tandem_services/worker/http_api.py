"""The worker's HTTP port, for probes, metrics and operators.

    GET  /live      200 while this process answers and the engine has reported within `LIVE_S`
    GET  /ready     200 when the router may send requests here, else 503 with the reasons
    GET  /metrics   Prometheus exposition
    GET  /audit     page audit by the engine; 200 with the report, 504 without a reply
    GET  /links     links to peers, as measured by the engine
    GET  /adapters  LoRA adapters, those in memory, and why others could not be loaded
    POST /drain     202; stop accepting requests, migrate running ones, exit 0
    POST /offer     200; offer a worker on standby to the router; 409 while the model loads
    POST /hold      200; a canary is testing this worker on standby, which must not offer itself in the meantime

    POST /abort          {"rid": "…"} one request by its exact id, {"all": true} every one
    POST /flush_cache    empty the prefix cache; 409 while requests hold KV
    POST /pause          {"mode": "in_place" | "retract" | "abort"}; in_place if the body is empty
    POST /resume
    POST /reload         {"path": "…"} weights of the same architecture; the served directory again without a path
    POST /load_lora_adapter    {"lora_name": "sql", "lora_path": "…", "load_inplace": false}; with a "digest", no other
                               content. What the name stands for already is loaded again without an effect
    POST /unload_lora_adapter  {"lora_name": "sql"}; with a "digest", only if the name stands for it. Requests that have
                               it continue
    POST /role           {"role": "prefill" | "decode" | "both"}; 409 while the worker drains
    POST /rates          {"force": false} measure prompts and decode steps; lines of JSON, the last one has the rates or
                         an error. 409 while requests run here, unless forced
    POST /profile        {"steps": 20, "seconds": 10}; 409 while a trace is recorded
    POST /profile/stop

The first three are open. All others need the order token (`common.tokens`), also from the same machine, unless
`--allow-remote-orders` is set.

Commands return 200 with the result, 400 for an invalid command or an unusable checkpoint, 409 if the command is not
possible now, and 504 without a reply of the engine. Bodies are JSON objects; an unknown field is an error, because a
misspelled one would have another effect than intended.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Protocol, Self, TypeVar

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_engine.base.addresses import LOOPBACK, Address, is_wildcard
from tandem_engine.config import Role
from tandem_engine.messages.control import (
    AbortRequests,
    AdapterMemory,
    AuditReport,
    EngineReady,
    FlushCache,
    LoadAdapter,
    OperatorOrder,
    OrderDone,
    PauseGeneration,
    PauseMode,
    ReloadWeights,
    ResumeGeneration,
    ServedAdapter,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)
from tandem_engine.messages.stats import LinkReport
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, render
from tandem_services.common.sockets import listen
from tandem_services.common.tokens import OrderAccess, TokenFile
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_services.worker.rates import MeasurementError, Progress, Rates

ANSWER_S = 30.0
"""A step that is being computed has to end before an order takes effect."""

RELOAD_S = 1800.0
"""Loading a large model from slow storage takes a while."""

MAX_BODY_BYTES = 1 << 16
BUSY = "busy"
Body = TypeVar("Body")


class Operate(Protocol):
    """Hands an order to the engine and waits for its answer."""

    async def __call__(self, order: Callable[[int], OperatorOrder], *, timeout_s: float) -> OrderDone:
        """Raises `OrderRefusedError` and `TimeoutError`."""
        ...


class SetRole(Protocol):
    """Changes what the worker is used for."""

    async def __call__(self, role: Role, *, timeout_s: float) -> OrderDone:
        """Raises `OrderRefusedError` and `TimeoutError`."""
        ...


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rid: str | None = None
    all: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.IN_PLACE


class ReloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """It may take the place of another one of its name."""
    digest: str = ""
    pinned: bool = False
    """It makes way for no other adapter."""


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    digest: str = ""
    cached: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$")] = ""
    """Content that requests have brought in, and that goes as well."""


class RoleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 20
    seconds: float = 10.0


class RatesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    force: bool = False
    """Even while requests run, which falsifies the figures."""


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of one worker."""

    adapters: tuple[ServedAdapter, ...] = ()
    """Those that new requests may have."""
    memory: AdapterMemory | None = None
    """None before the engine is ready."""

    @classmethod
    def of(cls, ready: EngineReady | None) -> Self:
        return cls() if ready is None else cls(adapters=ready.adapters, memory=ready.adapter_memory)


class EmptyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BadOrderError(Exception):
    """A body that contains no valid command."""


def operator_routes(operate: Operate, set_role: SetRole, *, model: str) -> list[Route]:
    """The routes of the module docstring. `model`: its name, which no adapter may have."""

    async def role(request: Request) -> Response:
        return await _answer(lambda: _set_role(request, set_role), ANSWER_S)

    def route(
        path: str,
        body_type: type[Body],
        order: Callable[[Body, int], OperatorOrder],
        timeout_s: float = ANSWER_S,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            async def carry_out() -> OrderDone:
                body = await _read(request, body_type)
                # The body is checked before anything is sent to the engine.
                order(body, 0)
                return await operate(lambda nonce: order(body, nonce), timeout_s=timeout_s)

            return await _answer(carry_out, timeout_s)

        return Route(path, endpoint, methods=["POST"])

    def load_adapter(body: LoadAdapterBody, nonce: int) -> LoadAdapter:
        if body.lora_name == model:
            raise BadOrderError(f"lora_name {model!r} is the name of the model: give the adapter another one")
        return LoadAdapter(
            nonce=nonce,
            name=body.lora_name,
            path=body.lora_path,
            replaces=body.load_inplace,
            digest=body.digest,
            pinned=body.pinned,
        )

    return [
        route("/load_lora_adapter", LoadAdapterBody, load_adapter, RELOAD_S),
        route(
            "/unload_lora_adapter",
            UnloadAdapterBody,
            lambda body, nonce: UnloadAdapter(nonce=nonce, name=body.lora_name, digest=body.digest, cached=body.cached),
        ),
        route("/abort", AbortBody, _abort),
        route("/flush_cache", EmptyBody, lambda body, nonce: FlushCache(nonce=nonce)),  # noqa: ARG005
        route("/pause", PauseBody, lambda body, nonce: PauseGeneration(nonce=nonce, mode=body.mode)),
        route("/resume", EmptyBody, lambda body, nonce: ResumeGeneration(nonce=nonce)),  # noqa: ARG005
        route("/reload", ReloadBody, lambda body, nonce: ReloadWeights(nonce=nonce, path=body.path), RELOAD_S),
        Route("/role", role, methods=["POST"]),
        route(
            "/profile",
            ProfileBody,
            lambda body, nonce: StartProfile(nonce=nonce, steps=body.steps, seconds=body.seconds),
        ),
        route("/profile/stop", EmptyBody, lambda body, nonce: StopProfile(nonce=nonce)),  # noqa: ARG005
    ]


async def _set_role(request: Request, set_role: SetRole) -> OrderDone:
    body = await _read(request, RoleBody)
    return await set_role(body.role, timeout_s=ANSWER_S)


async def _answer(carry_out: Callable[[], Awaitable[OrderDone]], timeout_s: float) -> Response:
    """What `carry_out` did, or why it did not, in HTTP."""
    try:
        done = await carry_out()
    except BadOrderError as error:
        return json_response({"code": "bad_order", "message": str(error)}, 400)
    except OrderRefusedError as error:
        status = 409 if error.code == BUSY else 400
        return json_response({"code": error.code, "message": str(error)}, status)
    except TimeoutError:
        message = f"the engine did not answer within {timeout_s:.0f} s"
        return json_response({"code": "timeout", "message": message}, 504)
    return json_response({"message": done.message, **done.figures})


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _abort(body: AbortBody, nonce: int) -> AbortRequests:
    if (body.rid is None) is not body.all:
        raise BadOrderError('abort takes either {"rid": "…"} or {"all": true}')
    return AbortRequests(nonce=nonce, rid=body.rid)


async def _read(request: Request, body_type: type[Body]) -> Body:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BadOrderError(f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(data) or b"{}", type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadOrderError(f"the body is not what this order takes: {error}") from error


async def _rates_lines(first: Progress | Rates, items: AsyncGenerator[Progress | Rates, None]) -> AsyncIterator[bytes]:
    """A line for each item. The status has been sent: an error is the last line."""
    try:
        # A client that goes away ends the measurement.
        async with aclosing(items):
            yield _rates_line(first)
            async for item in items:
                yield _rates_line(item)
    except MeasurementError as error:
        yield msgspec.json.encode({"error": str(error)}) + b"\n"


def _rates_line(item: Progress | Rates) -> bytes:
    return msgspec.json.encode({"rates": item} if isinstance(item, Rates) else item._asdict()) + b"\n"


CODES = {401: "unauthorized", 403: "forbidden", 415: "unsupported_media_type"}


class OrderGuard:
    """ASGI middleware: a client without access gets `open_paths`, and an error for all others."""

    def __init__(self, app: ASGIApp, *, open_paths: Collection[str], access: OrderAccess) -> None:
        self._app = app
        self._open_paths = open_paths
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["path"] in self._open_paths else self._access.refusal(HTTPConnection(scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = json_response({"message": refusal.message, "code": CODES[refusal.status]}, refusal.status)
        if refusal.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)


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
    adapters: Callable[[], AdapterReport]
    audit: Callable[[], Awaitable[AuditReport]]
    drain: Callable[[], None]
    operate: Operate
    set_role: SetRole
    offer: Callable[[], str | None]
    """End the standby; what is in its way, or None."""
    hold: Callable[[], None]
    """A canary is testing it."""
    measure_rates: Callable[[bool], AsyncGenerator[Progress | Rates, None]]
    """Given `force`. Raises `OrderRefusedError` before the first item, and `MeasurementError`."""
    order_access: OrderAccess
    model: str
    """Its name."""


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

    async def adapters(request: Request) -> Response:
        del request
        return json_response(probes.adapters())

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

    async def rates(request: Request) -> Response:
        try:
            body = await _read(request, RatesBody)
            items = probes.measure_rates(body.force)
            first = await anext(items)
        except BadOrderError as error:
            return json_response({"code": "bad_order", "message": str(error)}, 400)
        except OrderRefusedError as error:
            return json_response({"code": error.code, "message": str(error)}, 409)
        except MeasurementError as error:
            return json_response({"code": "measurement", "message": str(error)}, 504)
        return StreamingResponse(_rates_lines(first, items), media_type="application/x-ndjson")

    return Starlette(
        routes=[
            Route("/rates", rates, methods=["POST"]),
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/audit", audit),
            Route("/links", links),
            Route("/adapters", adapters),
            Route("/drain", drain, methods=["POST"]),
            Route("/offer", offer, methods=["POST"]),
            Route("/hold", hold, methods=["POST"]),
            *operator_routes(probes.operate, probes.set_role, model=probes.model),
        ],
        middleware=[Middleware(OrderGuard, open_paths=OPEN_PATHS, access=probes.order_access)],
    )


class HealthServer(uvicorn.Server):
    """Serves the probes on a separate port. The worker handles signals."""

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
                # The client of a command is identified by its connection, not by a header.
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
