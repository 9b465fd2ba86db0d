"""The gateway's composition root and its routes.

/v1/chat/completions /v1/completions       generation, plain ASGI: nothing between a token and its client
/v1/embeddings                             vectors of prompts
/v1/sessions /v1/sessions/{id}             conversations that a worker keeps (also /open_session, /close_session)
/v1/models /v1/models/{id}                 what is served
/tokenize /detokenize (also under /v1)     the tokenizer
/v1/requests/{id}/explain                  where a request ran and why
/live /ready /health /metrics /version     operations
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.clock import Clock, MonotonicClock
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.logs import quoted
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import ApiError, not_found
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, new_registry, render
from tandem_services.gateway.answer import Answering, GenerationEndpoint
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.boundary import RequestBoundary
from tandem_services.gateway.chat import ChatPlanner
from tandem_services.gateway.completions import CompletionPlanner
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.dispatch import Dispatcher, PairChooser, RetryPolicy
from tandem_services.gateway.embeddings import EmbeddingEndpoint
from tandem_services.gateway.engine_client import EnginePool, LivenessTiming
from tandem_services.gateway.error_responses import error_json
from tandem_services.gateway.explain import RequestJournal
from tandem_services.gateway.generation import Generator
from tandem_services.gateway.metrics import GatewayMetrics
from tandem_services.gateway.models import ServedModel
from tandem_services.gateway.prompts import PromptEncoder
from tandem_services.gateway.quarantine import Board, Quarantine
from tandem_services.gateway.retry_budget import RetryBudget
from tandem_services.gateway.revival import Revival
from tandem_services.gateway.session_routes import SessionRoutes
from tandem_services.gateway.session_turns import SessionDesk, SessionDirectory
from tandem_services.gateway.tokenization import Tokenization
from tandem_services.gateway.waiting_room import WaitingRoom

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
TOKENIZER_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
READ = ["GET", "HEAD"]
LABELLED_PATHS = frozenset({*GENERATION_PATHS, EmbeddingEndpoint.path, *TOKENIZER_PATHS, "/v1/models", "/v1/sessions"})
"""Paths that are metric labels; every other one counts as "other"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """The parts of a gateway that routes use."""

    registry: CollectorRegistry
    metrics: GatewayMetrics
    model: ServedModel
    executor: ThreadPoolExecutor
    prompts: PromptEncoder
    engines: EnginePool
    dispatcher: Dispatcher
    sessions: SessionRoutes
    answering: Answering
    health: Health
    clock: Clock

    async def close(self) -> None:
        """Stop what the gateway itself started. Running requests have ended."""
        await self.dispatcher.settle()
        self.engines.close()
        self.executor.shutdown(wait=False, cancel_futures=True)


def build_gateway(
    config: GatewayConfig,
    chooser: PairChooser,
    sessions: SessionDirectory,
    context: IpcContext,
    tokenizer: TextTokenizer,
    *,
    clock: Clock,
    health: Health,
    quarantine: Board | None = None,
) -> Gateway:
    """Compose the parts. The caller owns what it passes, and closes it after the gateway."""
    registry = new_registry()
    metrics = GatewayMetrics(registry, model=config.model_name)
    model = ServedModel(name=config.model_name, tokenizer=tokenizer, workers=chooser.workers)
    executor = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
    timing = LivenessTiming(ping_interval_s=config.ping_interval_s, unanswered_pings=config.unanswered_pings)

    def answers_again(incarnation: str) -> None:
        metrics.workers_answering_again.inc()
        chooser.mark_alive(incarnation)

    revival = Revival(context=context, clock=clock, on_alive=answers_again)
    engines = EnginePool(context=context, timing=timing, on_dead=chooser.mark_dead, revival=revival, clock=clock)
    dispatcher = Dispatcher(
        chooser=chooser,
        engines=engines,
        clock=clock,
        policy=_retry_policy(config),
        metrics=metrics,
        budget=RetryBudget(clock=clock),
        waiting=WaitingRoom(seats=config.max_waiting, metrics=metrics),
        quarantine=Quarantine(clock=clock, metrics=metrics, salt=_salt(context, config.cluster), board=quarantine),
    )
    generator = Generator(dispatcher=dispatcher, vocabulary=tokenizer.vocabulary, clock=clock, metrics=metrics)
    desk = SessionDesk(directory=sessions, ttl_s=config.session_ttl_s, turn_s=config.request_timeout_s)
    answering = Answering(
        generator=generator,
        journal=RequestJournal(config.explain_records),
        metrics=metrics,
        clock=clock,
        timeout_s=config.request_timeout_s,
    )
    health.add_check("workers", lambda: None if model.context_length else "no worker is registered")
    return Gateway(
        registry=registry,
        metrics=metrics,
        model=model,
        executor=executor,
        prompts=PromptEncoder(model=model, executor=executor),
        engines=engines,
        dispatcher=dispatcher,
        sessions=SessionRoutes(desk=desk, chooser=chooser, engines=engines),
        answering=answering,
        health=health,
        clock=clock,
    )


def _retry_policy(config: GatewayConfig) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=config.max_attempts,
        recovery_s=config.recovery_s,
        queue_s=config.queue_s,
        silence_s=config.silence_s,
        prefill_fallback=config.prefill_fallback,
    )


def _salt(context: IpcContext, cluster: str) -> bytes:
    """The same on all gateways of a deployment."""
    secret = b"" if context.keys is None else context.keys.secret
    return blake2b(cluster.encode(), key=secret, digest_size=16).digest()


def create_app(
    config: GatewayConfig,
    chooser: PairChooser,
    sessions: SessionDirectory,
    context: IpcContext,
    tokenizer: TextTokenizer,
    *,
    health: Health | None = None,
    clock: Clock | None = None,
    quarantine: Board | None = None,
) -> FastAPI:
    """The ASGI application. `chooser` must be started; it, `sessions`, `quarantine` and `context` outlive it.

    Whoever ends the application calls `health.drain()` some time before.
    """
    gateway = build_gateway(
        config,
        chooser,
        sessions,
        context,
        tokenizer,
        clock=clock or MonotonicClock(),
        health=health or Health(),
        quarantine=quarantine,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(gateway.dispatcher.quarantine.run(), name="quarantine")
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await gateway.close()

    boundary = Middleware(
        RequestBoundary,
        clock=gateway.clock,
        metrics=gateway.metrics,
        health=gateway.health,
        endpoints=LABELLED_PATHS,
    )
    app = FastAPI(
        title="Tandem",
        version=version("tandem"),
        lifespan=lifespan,
        middleware=[boundary],
        # A redirect would answer `/v1/models/` differently from what access rules see.
        redirect_slashes=False,
        openapi_url=None,
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.router.routes.extend(_generation_routes(gateway))
    app.router.routes.extend(_tokenizer_routes(gateway))
    app.router.routes.extend(gateway.sessions.routes())
    _add_model_routes(app, gateway)
    _add_operations_routes(app, gateway)
    return app


def _generation_routes(gateway: Gateway) -> list[Route]:
    desk = gateway.sessions.desk
    planners = (ChatPlanner(gateway.prompts, desk), CompletionPlanner(gateway.prompts, desk))
    embeddings = EmbeddingEndpoint(gateway.prompts, gateway.answering)
    return [Route(EmbeddingEndpoint.path, embeddings, methods=["POST"])] + [
        Route(planner.endpoint, GenerationEndpoint(planner, gateway.answering), methods=["POST"])
        for planner in planners
    ]


def _tokenizer_routes(gateway: Gateway) -> list[Route]:
    tokenization = Tokenization(gateway.prompts)
    return [
        Route(path, tokenization.detokenize if "detokenize" in path else tokenization.tokenize, methods=["POST"])
        for path in TOKENIZER_PATHS
    ]


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def list_models() -> Response:
        return _json(gateway.model.listing())

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def get_model(name: str) -> Response:
        gateway.model.check_name(name)
        return _json(gateway.model.card())

    @app.api_route("/v1/requests/{request_id}/explain", methods=READ)
    async def explain(request_id: str) -> Response:
        record = gateway.answering.journal.find(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return _json(record)


def _add_operations_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/live", methods=READ)
    async def live() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ready", methods=READ)
    @app.api_route("/health", methods=READ)
    async def ready() -> Response:
        report = gateway.health.report()
        return _json(report, report.http_status)

    @app.api_route("/version", methods=READ)
    async def get_version() -> Response:
        return _json({"version": app.version})

    @app.api_route("/metrics", methods=READ)
    async def get_metrics() -> Response:
        return Response(render(gateway.registry), headers={"content-type": CONTENT_TYPE})


def _json(document: object, status: int = 200) -> Response:
    return Response(encode_json(document), status, media_type="application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    """Routing's own refusals (404, 405) in OpenAI's shape."""
    assert isinstance(error, HTTPException), type(error)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    refusal = ApiError(error.status_code, error.detail, kind=kind)
    return Response(error_json(refusal), error.status_code, error.headers, "application/json")
