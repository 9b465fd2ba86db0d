"""The HTTP API of a stand-alone router.

POST /v1/choose              chooses workers for one request and reserves them
POST /v1/release             the request has ended
GET  /v1/workers[?model=M]   all live workers
GET  /v1/choices[?limit=N]   recent choices, newest first
GET  /v1/choices/{id}        one choice, by reservation or by the id of the front end
GET  /live /ready /health /version /metrics
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import quoted
from tandem_engine.base.release import product_version
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.errors import ApiError, bad_request, not_found
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, render
from tandem_services.common.tokens import BearerToken
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.middleware import RequestBoundary
from tandem_services.gateway.http.monitoring_routes import READ, http_error, json_response
from tandem_services.router.decision import RouteQuery
from tandem_services.router_server.request_reading import RequestReading
from tandem_services.router_server.routing_service import Places, RouterMetrics, RoutingService
from tandem_services.router_server.schemas import (
    ChoiceList,
    ChoiceRecord,
    ChooseAsk,
    ChosenRoute,
    ReleaseAnswer,
    ReleaseAsk,
    WorkerList,
)

LABELLED_PATHS = frozenset({"/v1/choose", "/v1/release", "/v1/workers", "/v1/choices", "/metrics"})
PROBES = frozenset({"/live", "/ready", "/health"})

Background = Callable[[], dict[str, Coroutine[Any, Any, None]]]
"""Makes what runs as long as the application does, by name."""

DEFAULT_LISTED = 20
MAX_LISTED = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterApi:
    """What the API does, whichever protocol it is spoken in."""

    routing: RoutingService
    reading: RequestReading
    places: Places
    clock: Clock
    metrics: RouterMetrics
    token: BearerToken | None
    """None: any client of the port may query."""

    async def choose(self, ask: ChooseAsk, *, interface: str) -> ChosenRoute:
        """Raises `ApiError`."""
        began = self.clock.now()
        try:
            with self.places.one():
                ask.check()
                query = RouteQuery(
                    request_id=ask.request_id or uuid.uuid4().hex,
                    model=self.reading.own_name(ask.model),
                    token_ids=await self.reading.prompt(ask),
                    cache_salt=ask.cache_salt,
                    max_tokens=ask.max_tokens,
                    exclude=frozenset(ask.exclude),
                    session_key=ask.session,
                )
                held = await self.routing.choose(
                    query,
                    priority=ask.priority,
                    for_gateway=ask.for_gateway,
                    interface=interface,
                    return_token_ids=ask.return_token_ids,
                )
        except ApiError as error:
            self.metrics.refused(interface, error.status)
            raise
        self.metrics.choice_seconds.observe(self.clock.now() - began)
        return held.record.choice

    def workers(self, model: str | None) -> WorkerList:
        found = self.routing.router.workers()
        return WorkerList(workers=tuple(worker for worker in found if not model or worker.model == model))

    def explain(self, name: str) -> ChoiceRecord:
        """Raises `ApiError` 404."""
        record = self.routing.holds.find(name)
        if record is None:
            raise not_found(f"No recent choice has the id '{quoted(name)}'.", "id")
        return record

    def check_token(self, authorization: str | None) -> None:
        """Raises `ApiError` 401."""
        if self.token is not None and not self.token.admits(authorization):
            message = "This router needs its token, sent as Authorization: Bearer TOKEN."
            raise ApiError(401, message, kind="AuthenticationError", reason="invalid_token")


class TokenGate:
    """ASGI middleware: a client without the token gets only the responses of probes."""

    def __init__(self, app: ASGIApp, *, api: RouterApi) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
            self._api.check_token(given[0] if len(given) == 1 else None)
        await self._app(scope, receive, send)


def http_app(
    api: RouterApi,
    *,
    health: Health,
    registry: CollectorRegistry,
    background: Background,
    hosts: AllowedHosts,
) -> Starlette:
    """The ASGI application of the HTTP port, which answers requests for `hosts`."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work, name=name) for name, work in background().items()]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    boundary = Middleware(
        RequestBoundary, clock=api.clock, metrics=api.metrics, health=health, endpoints=LABELLED_PATHS, hosts=hosts
    )
    app = Starlette(
        routes=[*_choice_routes(api), *_operations_routes(health, registry)],
        lifespan=lifespan,
        middleware=[boundary, Middleware(TokenGate, api=api)],
        exception_handlers={HTTPException: http_error},
    )
    app.router.redirect_slashes = False
    return app


def _choice_routes(api: RouterApi) -> list[Route]:
    asks, releases = BodyDecoder(ChooseAsk, strict=True), BodyDecoder(ReleaseAsk, strict=True)

    async def choose(request: Request) -> Response:
        ask = await decode_body(asks.decode, await read_body(request))
        return json_response(await api.choose(ask, interface="http"))

    async def release(request: Request) -> Response:
        ask = await decode_body(releases.decode, await read_body(request))
        return json_response(ReleaseAnswer(released=await api.routing.release(ask.reservation)))

    async def workers(request: Request) -> Response:
        return json_response(api.workers(request.query_params.get("model")))

    async def choices(request: Request) -> Response:
        return json_response(ChoiceList(choices=api.routing.holds.newest(_limit(request))))

    async def explain(request: Request) -> Response:
        return json_response(api.explain(request.path_params["id"]))

    return [
        Route("/v1/choose", choose, methods=["POST"]),
        Route("/v1/release", release, methods=["POST"]),
        Route("/v1/workers", workers, methods=READ),
        Route("/v1/choices", choices, methods=READ),
        Route("/v1/choices/{id}", explain, methods=READ),
    ]


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LISTED))
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:10]) <= MAX_LISTED:
        raise bad_request(f"limit must be between 1 and {MAX_LISTED}, got {quoted(text)}", "limit")
    return int(text)


def _operations_routes(health: Health, registry: CollectorRegistry) -> list[Route]:
    async def live(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        report = health.report()
        return json_response(report, report.http_status)

    async def get_version(_: Request) -> Response:
        return json_response({"version": product_version()})

    async def metrics(_: Request) -> Response:
        return Response(await render(registry), headers={"content-type": CONTENT_TYPE})

    answers = {"/live": live, "/ready": ready, "/health": ready, "/version": get_version, "/metrics": metrics}
    return [Route(path, answer, methods=READ) for path, answer in answers.items()]
