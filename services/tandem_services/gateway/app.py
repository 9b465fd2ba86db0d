"""Builds a gateway from its configuration, and the ASGI application with its routes.

/v1/chat/completions /v1/completions       generation, plain ASGI: no framework between a token and its client
/v1/responses                              the same as chat, in OpenAI's Responses format, stateless
/v1/messages /v1/messages/count_tokens     the same in Anthropic's Messages format
/v1/embeddings                             vectors of prompts
/v1/sessions /v1/sessions/{id}             conversations that a worker keeps (also /open_session, /close_session)
/v1/models /v1/models/{id}                 served models
/tokenize /detokenize (also under /v1)     the tokenizer
/v1/requests/{id}/explain                  where a request ran and why
/live /ready /health /version              monitoring
/openapi.json                              description of all these routes
/metrics /console                          unless there is a port for administrators (`admin`)
/v1/load_lora_adapter /v1/unload_lora_adapter (also without /v1)     the same
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.logs import quoted
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.errors import not_found
from tandem_services.common.health import Health
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.common.recording import RecordingErrors
from tandem_services.common.tokens import OrderAccess, token_for
from tandem_services.gateway.access.keys import KeyWatch, cache_secret, deployment_secret
from tandem_services.gateway.access.tenants import AccessMetrics, TenantLimits
from tandem_services.gateway.access.tenants import Board as UsageBoard
from tandem_services.gateway.api.adapters import ADAPTER_PATHS, AdapterRoutes
from tandem_services.gateway.api.anthropic.answers import models_answer
from tandem_services.gateway.api.anthropic.requests import MessagesPlanner, TokenCount
from tandem_services.gateway.api.chat import ChatPlanner
from tandem_services.gateway.api.completions import CompletionPlanner
from tandem_services.gateway.api.embeddings import EmbeddingEndpoint
from tandem_services.gateway.api.openapi.document import Traits, document_route
from tandem_services.gateway.api.response_writer import Answering, GenerationEndpoint, Planner
from tandem_services.gateway.api.responses.requests import ResponsesPlanner
from tandem_services.gateway.api.sessions import SessionRoutes
from tandem_services.gateway.api.tokenize import Tokenization
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.dispatch.engine_client import LivenessTiming
from tandem_services.gateway.dispatch.reading_pace import ReadingPace
from tandem_services.gateway.http.authentication import Access, Authentication
from tandem_services.gateway.http.middleware import RequestBoundary, identity_of
from tandem_services.gateway.http.monitoring_routes import (
    METRICS_PATH,
    READ,
    VERSION,
    Load,
    http_error,
    json_response,
    operations_routes,
)
from tandem_services.gateway.limits import BodyBudget
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import Fleet, ModelService, Shared, build_model_service
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads
from tandem_services.gateway.observe.explain import RequestJournal
from tandem_services.gateway.observe.metrics import PREFIX, HttpMetrics
from tandem_services.gateway.observe.tracing import Traces, pass_on
from tandem_services.gateway.process_place import ProcessPlace
from tandem_services.gateway.processes.others import explained_elsewhere

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport


@dataclass(frozen=True, slots=True)
class Home:
    """Whose key authorizes commands to a gateway and separates caches of its tenants: of a fleet, or of none."""

    keys: KeyPair | None
    cluster: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """The parts of a gateway that routes use."""

    registry: CollectorRegistry
    metrics: HttpMetrics
    models: ModelCatalog
    shared: Shared
    """Parts that its model services share."""
    tokenizing: TokenizerThreads
    answering: Answering
    bodies: BodyBudget
    """Of all its ports."""
    access: Access | None
    """None: authentication is disabled."""
    order_access: OrderAccess
    """What orders on the administrators' port need."""
    hosts: AllowedHosts
    """That requests may be for, on either port."""
    health: Health
    clock: Clock
    traces: Traces
    strict_fields: bool
    """Requests with unknown fields are rejected."""
    place: ProcessPlace | None = None
    """Among the processes of this gateway, if there are others."""

    def build_service(self, fleet: Fleet) -> ModelService:
        """One more model service, of `fleet`. Its caller starts it before adding it to `models`."""
        return build_model_service(fleet if self.access is not None else _unshared(fleet), self.shared)

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Background tasks of the gateway in addition to its model services, by name."""
        if self.access is None:
            return {}
        return {"api keys": self.access.keys.run(), "leases of requests": self.access.limits.run()}

    async def close(self) -> None:
        """Stop what the gateway itself started. Running requests have ended."""
        for service in self.models:
            await service.close()
        if self.access is not None:
            await self.access.limits.close()
        self.tokenizing.close()


def build_gateway(
    config: GatewayConfig,
    fleets: Sequence[Fleet],
    *,
    clock: Clock,
    health: Health,
    usage: UsageBoard | None = None,
    spans: "SpanExport | None" = None,
    home: Home | None = None,
) -> Gateway:
    """Compose the parts. The caller owns what it passes, and closes it after the gateway. `spans`: where traces go.

    `fleets` are those of `config.models`; `usage` is what all gateways share of it, None where this one is alone.
    `home`: None for that of the first fleet.

    Raises `ConfigError` for a key file that is no good.
    """
    registry = new_registry()
    families = MetricFamilies(registry)
    registry.register(RecordingErrors(PREFIX))
    tokenizing = TokenizerThreads(long_threads=config.tokenizer_threads)
    shared = Shared(
        clock=clock,
        families=families,
        tokenizing=tokenizing,
        timing=LivenessTiming(ping_interval_s=config.ping_interval_s, unanswered_pings=config.unanswered_pings),
        pace=ReadingPace(lambda: tokenizing.waiting_turns),
        turn_s=config.request_timeout_s,
    )
    known = fleets if config.api_keys is not None else [_unshared(fleet) for fleet in fleets]
    models = ModelCatalog([build_model_service(fleet, shared) for fleet in known])
    place = config.place
    most_bytes = config.bodies_bytes if place is None else place.share_of(config.bodies_bytes)
    bodies = BodyBudget(most=most_bytes, most_per_client=min(most_bytes, config.bodies_bytes_per_client))
    metrics = HttpMetrics(families)
    metrics.watch_bodies(lambda: bodies.held)
    home = home or Home(fleets[0].context.keys, fleets[0].config.cluster)
    listening = (config.host,) if config.admin_port is None else (config.host, config.admin_host)
    hosts = AllowedHosts.of(config.allowed_hosts, listening=listening)
    secret = deployment_secret(home.keys, home.cluster)
    if not config.independent_models:
        # Of a model whose tokenizer is awaited, there is a check that says so.
        health.add_check("workers", lambda: None if models.awaited else _missing_workers(models))
    return Gateway(
        registry=registry,
        metrics=metrics,
        models=models,
        shared=shared,
        tokenizing=tokenizing,
        answering=Answering(
            journal=RequestJournal(config.explain_records), clock=clock, timeout_s=config.request_timeout_s
        ),
        bodies=bodies,
        access=_access(config, registry, usage, secret, clock),
        order_access=OrderAccess(token=_order_token(home.keys, place), hosts=hosts),
        hosts=hosts,
        health=health,
        clock=clock,
        traces=_traces(models, registry, spans, clock),
        strict_fields=config.strict_fields,
        place=place,
    )


def _order_token(keys: KeyPair | None, place: ProcessPlace | None) -> str:
    """The same in all processes of the gateway."""
    return token_for(keys) if keys is not None or place is None else place.token


def _unshared(fleet: Fleet) -> Fleet:
    """Without keys there is one tenant, and nothing to share out."""
    return replace(fleet, fairness=None)


def _traces(models: ModelCatalog, registry: CollectorRegistry, spans: "SpanExport | None", clock: Clock) -> Traces:
    if spans is None:
        return pass_on
    from tandem_services.common.span_export import SpanMetrics
    from tandem_services.gateway.observe.spans import GatewayTraces

    registry.register(SpanMetrics(PREFIX, spans.counts))
    return GatewayTraces(tracer=spans.tracer, clock=clock, policies_of=models.policies_of)


def _missing_workers(models: ModelCatalog) -> str | None:
    """A gateway is ready while one of its models is served, or would be at the first request."""
    return None if any(service.takes_requests for service in models) else "no worker is registered"


def _access(
    config: GatewayConfig, registry: CollectorRegistry, board: UsageBoard | None, secret: bytes, clock: Clock
) -> Access | None:
    if config.api_keys is None:
        return None
    metrics = AccessMetrics(registry)
    keys = KeyWatch(path=config.api_keys, metrics=metrics)
    keys.start()
    return Access(
        keys=keys,
        limits=TenantLimits(clock=clock, metrics=metrics, board=board, place=config.place),
        metrics=metrics,
        cache_secret=cache_secret(secret),
        admin_paths=(METRICS_PATH, *ADAPTER_PATHS),
    )


GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MessagesPlanner.endpoint)
TOKENIZER_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
_OTHER_PATHS = (EmbeddingEndpoint.path, TokenCount.path, "/v1/models", "/v1/sessions")

LABELLED_PATHS = frozenset({*GENERATION_PATHS, *TOKENIZER_PATHS, *_OTHER_PATHS})
"""Paths that are metric labels; every other one counts as "other"."""


def create_app(
    config: GatewayConfig,
    fleets: Sequence[Fleet],
    *,
    health: Health | None = None,
    clock: Clock | None = None,
    usage: UsageBoard | None = None,
    spans: "SpanExport | None" = None,
) -> FastAPI:
    """A gateway and its application: see `build_gateway` and `api_app`."""
    clock, health = clock or MonotonicClock(), health or Health()
    gateway = build_gateway(config, fleets, clock=clock, health=health, usage=usage, spans=spans)
    return api_app(gateway, metrics=config.admin_port is None)


def api_app(gateway: Gateway, *, metrics: bool, console: Console | None = None) -> FastAPI:
    """The ASGI application of users. `metrics`: there is no port for administrators, so this one has /metrics and the
    routes of adapters; `console`: with that. Its life is the gateway's.

    What the gateway was built with must be started, and outlives the application. The component that ends it calls
    `health.drain()` some time before.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for service in gateway.models:
            service.start()
        background = [asyncio.create_task(work, name=name) for name, work in gateway.background().items()]
        yield
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await gateway.close()

    access = gateway.access if console is None else console.admit(gateway.access)
    generation = generation_routes(gateway)
    app = UserApp(
        title="Tandem",
        version=VERSION,
        lifespan=lifespan,
        middleware=[
            boundary_of(gateway),
            Middleware(Authentication, access=access),
        ],
        # A redirect would answer `/v1/models/` differently from what access rules see.
        redirect_slashes=False,
        openapi_url=None,
        # Newer FastAPI traces by itself wherever a provider is set: a second time, and with bodies at hand.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.direct = _direct(gateway, generation, access)
    app.add_exception_handler(HTTPException, http_error)
    app.router.routes.extend(generation)
    app.router.routes.extend(_tokenizer_routes(gateway))
    app.router.routes.extend(SessionRoutes(gateway.models).routes())
    _add_model_routes(app, gateway)
    app.router.routes.extend(operations_routes(gateway.health, gateway.registry, metrics=metrics))
    if metrics:
        app.router.routes.extend(adapter_routes(gateway))
    if console is not None:
        app.router.routes.extend(console.routes())
    app.router.routes.append(description_route(gateway, metrics=metrics))
    return app


def description_route(gateway: Gateway, *, metrics: bool) -> Route:
    """`GET /openapi.json` of the application of users."""
    traits = Traits(strict_fields=gateway.strict_fields, keys=gateway.access is not None, metrics=metrics)
    return document_route(traits)


class UserApp(FastAPI):
    """With applications of POST requests by path that the framework's own layers are not called for: these cost such a
    request more than all layers of the gateway."""

    direct: Mapping[str, ASGIApp] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (super().__call__ if direct is None else direct)(scope, receive, send)


def _direct(gateway: Gateway, routes: Sequence[Route], access: Access | None) -> dict[str, ASGIApp]:
    """Generation endpoints by path, within the two layers that all routes have."""
    return {
        route.path: RequestBoundary(
            Authentication(route.endpoint, access=access), **_boundary_fields(gateway), sends_body_after_head=True
        )
        for route in routes
        if isinstance(route.endpoint, GenerationEndpoint)
    }


def boundary_of(gateway: Gateway) -> Middleware:
    """The outermost layer of each of its applications."""
    return Middleware(RequestBoundary, **_boundary_fields(gateway))


def _boundary_fields(gateway: Gateway) -> dict[str, Any]:
    return {
        "clock": gateway.clock,
        "metrics": gateway.metrics,
        "health": gateway.health,
        "endpoints": LABELLED_PATHS,
        "traces": gateway.traces,
        "hosts": gateway.hosts,
        "bodies": gateway.bodies,
        "refused": gateway.answering.refused,
    }


def generation_routes(gateway: Gateway) -> list[Route]:
    models, answering, strict = gateway.models, gateway.answering, gateway.strict_fields
    chats = ChatPlanner(strict=strict)
    embeddings = EmbeddingEndpoint(models, answering, strict=strict)
    # Their APIs know no answer without output.
    answers = ChatPlanner(strict=strict, fewest_tokens=1)
    messages = MessagesPlanner(answers, strict=strict)
    responses = ResponsesPlanner(answers, strict=strict)
    planners: tuple[Planner[Any], ...] = (chats, CompletionPlanner(strict=strict), responses, messages)
    return [
        Route(EmbeddingEndpoint.path, embeddings, methods=["POST"]),
        Route(TokenCount.path, TokenCount(messages, models, answering).answer, methods=["POST"]),
    ] + [
        Route(planner.endpoint, GenerationEndpoint(planner, models, answering), methods=["POST"])
        for planner in planners
    ]


def adapter_routes(gateway: Gateway) -> list[Route]:
    """Of the port that administrators use."""
    return AdapterRoutes(gateway.models, gateway.order_access, gateway.access is not None).routes()


def _tokenizer_routes(gateway: Gateway) -> list[Route]:
    tokenization = Tokenization(gateway.models, gateway.answering, strict=gateway.strict_fields)
    return [
        Route(path, tokenization.detokenize if "detokenize" in path else tokenization.tokenize, methods=["POST"])
        for path in TOKENIZER_PATHS
    ] + [Route("/tokenizer_info", tokenization.info, methods=READ)]


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def list_models(request: Request) -> Response:
        return json_response(models_answer(gateway.models.listing(identity_of(request.scope).caller), request.headers))

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def get_model(name: str, request: Request) -> Response:
        return json_response(
            models_answer(gateway.models.card(name, identity_of(request.scope).caller), request.headers)
        )

    @app.api_route("/load", methods=READ)
    async def load(_: Request) -> Response:
        return json_response(Load(server_load=gateway.answering.running))

    @app.api_route("/v1/requests/{request_id}/explain", methods=READ)
    async def explain(request_id: str, request: Request) -> Response:
        tenant = identity_of(request.scope).caller.tenant.name
        record = gateway.answering.journal.find(request_id, tenant=tenant)
        if record is None and gateway.place is not None:
            record = await explained_elsewhere(gateway.place, request_id, tenant=tenant)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)
