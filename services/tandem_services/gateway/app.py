"""The gateway's composition root and its routes.

/v1/chat/completions /v1/completions       generation, plain ASGI: nothing between a token and its client
/v1/responses                              the same as a chat, in the form of OpenAI's Responses API, stateless
/v1/messages /v1/messages/count_tokens     the same in the form of Anthropic's Messages API
/v1/embeddings                             vectors of prompts
/v1/sessions /v1/sessions/{id}             conversations that a worker keeps (also /open_session, /close_session)
/v1/models /v1/models/{id}                 what is served
/tokenize /detokenize (also under /v1)     the tokenizer
/v1/requests/{id}/explain                  where a request ran and why
/live /ready /health /version              operations
/openapi.json                              all of this, for programs
/metrics /console                          unless there is a port for administrators (`admin`)
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.clock import Clock, MonotonicClock
from tandem_engine.logs import quoted
from tandem_services.common.errors import ApiError, not_found
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, MetricFamilies, new_registry, render
from tandem_services.common.order_token import order_token
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.authentication import Access, Authentication
from tandem_services.gateway.access.deployment_secret import cache_secret, deployment_secret
from tandem_services.gateway.access.key_watch import KeyWatch
from tandem_services.gateway.access.tenant_limits import Board as UsageBoard
from tandem_services.gateway.access.tenant_limits import TenantLimits
from tandem_services.gateway.answer import GenerationEndpoint, Planner
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.answering import Answering
from tandem_services.gateway.boundary import RequestBoundary, identity_of
from tandem_services.gateway.chat import ChatPlanner
from tandem_services.gateway.completions import CompletionPlanner
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.embeddings import EmbeddingEndpoint
from tandem_services.gateway.engine_client import LivenessTiming
from tandem_services.gateway.error_responses import error_body
from tandem_services.gateway.explain import RequestJournal
from tandem_services.gateway.messages.count_tokens import TokenCount
from tandem_services.gateway.messages.planner import MessagesPlanner
from tandem_services.gateway.metrics import PREFIX, HttpMetrics
from tandem_services.gateway.model_catalog import ModelCatalog
from tandem_services.gateway.model_service import Fleet, ModelService, Shared, build_model_service
from tandem_services.gateway.openapi.document import Traits, document_route
from tandem_services.gateway.probe_schemas import VERSION, Live, Version
from tandem_services.gateway.request_trace import Traces, pass_on
from tandem_services.gateway.responses.planner import ResponsesPlanner
from tandem_services.gateway.session_routes import SessionRoutes
from tandem_services.gateway.tokenization import Tokenization

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MessagesPlanner.endpoint)
TOKENIZER_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
METRICS_PATH = "/metrics"
_OTHER_PATHS = (EmbeddingEndpoint.path, TokenCount.path, "/v1/models", "/v1/sessions")
READ = ["GET", "HEAD"]
LABELLED_PATHS = frozenset({*GENERATION_PATHS, *TOKENIZER_PATHS, *_OTHER_PATHS})
"""Paths that are metric labels; every other one counts as "other"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """The parts of a gateway that routes use."""

    registry: CollectorRegistry
    metrics: HttpMetrics
    models: ModelCatalog
    shared: Shared
    """What its model services are lent."""
    executor: ThreadPoolExecutor
    answering: Answering
    access: Access | None
    """None: everybody may do everything."""
    order_token: str | None
    """What the operator brings; None without a key file of the deployment."""
    health: Health
    clock: Clock
    traces: Traces
    strict_fields: bool
    """Requests with fields that nobody knows are refused."""

    def build_service(self, fleet: Fleet) -> ModelService:
        """One more model service, of `fleet`. Whoever makes it known to `models` starts it before."""
        return build_model_service(fleet if self.access is not None else _unshared(fleet), self.shared)

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs as long as the gateway serves beside its model services, by name."""
        if self.access is None:
            return {}
        return {"api keys": self.access.keys.run(), "leases of requests": self.access.limits.run()}

    async def close(self) -> None:
        """Stop what the gateway itself started. Running requests have ended."""
        for service in self.models:
            await service.close()
        if self.access is not None:
            await self.access.limits.close()
        self.executor.shutdown(wait=False, cancel_futures=True)


def build_gateway(
    config: GatewayConfig,
    fleets: Sequence[Fleet],
    *,
    clock: Clock,
    health: Health,
    usage: UsageBoard | None = None,
    spans: "SpanExport | None" = None,
) -> Gateway:
    """Compose the parts. The caller owns what it passes, and closes it after the gateway. `spans`: where traces go.

    `fleets` are those of `config.models`; `usage` is what all gateways share of it, None where this one is alone.

    Raises `ConfigError` for a key file that is no good.
    """
    registry = new_registry()
    families = MetricFamilies(registry)
    executor = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
    shared = Shared(
        clock=clock,
        families=families,
        executor=executor,
        timing=LivenessTiming(ping_interval_s=config.ping_interval_s, unanswered_pings=config.unanswered_pings),
        turn_s=config.request_timeout_s,
    )
    known = fleets if config.api_keys is not None else [_unshared(fleet) for fleet in fleets]
    models = ModelCatalog([build_model_service(fleet, shared) for fleet in known])
    first = fleets[0]
    secret = deployment_secret(first.context.keys, first.config.cluster)
    health.add_check("workers", lambda: _missing_workers(models))
    return Gateway(
        registry=registry,
        metrics=HttpMetrics(families),
        models=models,
        shared=shared,
        executor=executor,
        answering=Answering(
            journal=RequestJournal(config.explain_records), clock=clock, timeout_s=config.request_timeout_s
        ),
        access=_access(config, registry, usage, secret, clock),
        order_token=None if first.context.keys is None else order_token(first.context.keys),
        health=health,
        clock=clock,
        traces=_traces(models, registry, spans, clock),
        strict_fields=config.strict_fields,
    )


def _unshared(fleet: Fleet) -> Fleet:
    """Without keys there is one tenant, and nothing to share out."""
    return replace(fleet, fairness=None)


def _traces(models: ModelCatalog, registry: CollectorRegistry, spans: "SpanExport | None", clock: Clock) -> Traces:
    if spans is None:
        return pass_on
    from tandem_services.common.span_export import SpanMetrics
    from tandem_services.gateway.request_spans import GatewayTraces

    registry.register(SpanMetrics(PREFIX, spans.counts))
    return GatewayTraces(tracer=spans.tracer, clock=clock, policies_of=models.policies_of)


def _missing_workers(models: ModelCatalog) -> str | None:
    """A gateway is of use as long as one of its models is served, or would be as soon as somebody asks."""
    of_use = any(service.model.context_length or service.model.from_zero for service in models)
    return None if of_use else "no worker is registered"


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
        limits=TenantLimits(clock=clock, metrics=metrics, board=board),
        metrics=metrics,
        cache_secret=cache_secret(secret),
        admin_paths=(METRICS_PATH,),
    )


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
    """The ASGI application of users; `metrics`: with /metrics; `console`: with that. Its life is the gateway's.

    What the gateway was built with must be started, and outlives the application. Whoever ends it calls
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
    app = FastAPI(
        title="Tandem",
        version=VERSION,
        lifespan=lifespan,
        middleware=[boundary_of(gateway), Middleware(Authentication, access=access)],
        # A redirect would answer `/v1/models/` differently from what access rules see.
        redirect_slashes=False,
        openapi_url=None,
        # Newer FastAPI traces by itself wherever a provider is set: a second time, and with bodies at hand.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.add_exception_handler(HTTPException, http_error)
    app.router.routes.extend(generation_routes(gateway))
    app.router.routes.extend(_tokenizer_routes(gateway))
    app.router.routes.extend(SessionRoutes(gateway.models).routes())
    _add_model_routes(app, gateway)
    app.router.routes.extend(operations_routes(gateway, metrics=metrics))
    if console is not None:
        app.router.routes.extend(console.routes())
    traits = Traits(strict_fields=gateway.strict_fields, keys=gateway.access is not None, metrics=metrics)
    app.router.routes.append(document_route(traits))
    return app


def boundary_of(gateway: Gateway) -> Middleware:
    """The outermost layer of each of its applications."""
    return Middleware(
        RequestBoundary,
        clock=gateway.clock,
        metrics=gateway.metrics,
        health=gateway.health,
        endpoints=LABELLED_PATHS,
        traces=gateway.traces,
    )


def generation_routes(gateway: Gateway) -> list[Route]:
    models, answering, strict = gateway.models, gateway.answering, gateway.strict_fields
    chats = ChatPlanner(strict=strict)
    embeddings = EmbeddingEndpoint(models, answering, strict=strict)
    messages = MessagesPlanner(chats, strict=strict)
    responses = ResponsesPlanner(chats, strict=strict)
    planners: tuple[Planner[Any], ...] = (chats, CompletionPlanner(strict=strict), responses, messages)
    return [
        Route(EmbeddingEndpoint.path, embeddings, methods=["POST"]),
        Route(TokenCount.path, TokenCount(messages, models).answer, methods=["POST"]),
    ] + [
        Route(planner.endpoint, GenerationEndpoint(planner, models, answering), methods=["POST"])
        for planner in planners
    ]


def _tokenizer_routes(gateway: Gateway) -> list[Route]:
    tokenization = Tokenization(gateway.models, strict=gateway.strict_fields)
    return [
        Route(path, tokenization.detokenize if "detokenize" in path else tokenization.tokenize, methods=["POST"])
        for path in TOKENIZER_PATHS
    ]


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def list_models(request: Request) -> Response:
        return json_response(gateway.models.listing(identity_of(request.scope).caller))

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def get_model(name: str, request: Request) -> Response:
        return json_response(gateway.models.card(name, identity_of(request.scope).caller))

    @app.api_route("/v1/requests/{request_id}/explain", methods=READ)
    async def explain(request_id: str, request: Request) -> Response:
        tenant = identity_of(request.scope).caller.tenant.name
        record = gateway.answering.journal.find(request_id, tenant=tenant)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)


def operations_routes(gateway: Gateway, *, metrics: bool) -> list[Route]:
    """What probes and Prometheus ask; `metrics`: with /metrics."""

    async def live(_: Request) -> Response:
        return json_response(Live())

    async def ready(_: Request) -> Response:
        report = gateway.health.report()
        return json_response(report, report.http_status)

    async def get_version(_: Request) -> Response:
        return json_response(Version(version=VERSION))

    async def get_metrics(_: Request) -> Response:
        return Response(render(gateway.registry), headers={"content-type": CONTENT_TYPE})

    answers = {"/live": live, "/ready": ready, "/health": ready, "/version": get_version}
    if metrics:
        answers[METRICS_PATH] = get_metrics
    return [Route(path, answer, methods=READ) for path, answer in answers.items()]


def json_response(document: object, status: int = 200) -> Response:
    return Response(encode_json(document), status, media_type="application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """Routing's own refusals (404, 405) in the shape that clients of the path expect."""
    assert isinstance(error, HTTPException), type(error)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    refusal = ApiError(error.status_code, error.detail, kind=kind)
    body = error_body(refusal, path=request.scope["path"], request_id=identity_of(request.scope).public_id)
    return Response(body, error.status_code, error.headers, "application/json")
