"""The gateway's routes, put before its parts (`composition`).

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.clock import Clock, MonotonicClock
from tandem_engine.logs import quoted
from tandem_services.common.errors import not_found
from tandem_services.common.health import Health
from tandem_services.gateway.access.authentication import Authentication
from tandem_services.gateway.access.tenant_limits import Board as UsageBoard
from tandem_services.gateway.answer import GenerationEndpoint, Planner
from tandem_services.gateway.boundary import RequestBoundary, identity_of
from tandem_services.gateway.chat import ChatPlanner
from tandem_services.gateway.completions import CompletionPlanner
from tandem_services.gateway.composition import Gateway, build_gateway
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.embeddings import EmbeddingEndpoint
from tandem_services.gateway.messages.count_tokens import TokenCount
from tandem_services.gateway.messages.models import models_answer
from tandem_services.gateway.messages.planner import MessagesPlanner
from tandem_services.gateway.model_service import Fleet
from tandem_services.gateway.openapi.document import Traits, document_route
from tandem_services.gateway.operations import READ, http_error, json_response, operations_routes
from tandem_services.gateway.probe_schemas import VERSION, Load
from tandem_services.gateway.responses.planner import ResponsesPlanner
from tandem_services.gateway.session_routes import SessionRoutes
from tandem_services.gateway.tokenization import Tokenization

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport

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
    app.router.routes.extend(operations_routes(gateway.health, gateway.registry, metrics=metrics))
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
        hosts=gateway.hosts,
        bodies=gateway.bodies,
        refused=gateway.answering.refused,
    )


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
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)
