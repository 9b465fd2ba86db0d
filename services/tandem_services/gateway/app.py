"""The gateway's composition root and its routes.

/v1/chat/completions /v1/completions       generation, plain ASGI: nothing between a token and its client
/v1/responses                              the same as a chat, in the form of OpenAI's Responses API, stateless
/v1/embeddings                             vectors of prompts
/v1/sessions /v1/sessions/{id}             conversations that a worker keeps (also /open_session, /close_session)
/v1/models /v1/models/{id}                 what is served
/tokenize /detokenize (also under /v1)     the tokenizer
/v1/requests/{id}/explain                  where a request ran and why
/live /ready /health /version              operations
/metrics                                   unless there is a port for administrators (`admin`)
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

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
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.authentication import Access, Authentication
from tandem_services.gateway.access.key_watch import KeyWatch
from tandem_services.gateway.access.tenant_limits import Board as UsageBoard
from tandem_services.gateway.access.tenant_limits import TenantLimits
from tandem_services.gateway.answer import GenerationEndpoint
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.answering import Answering
from tandem_services.gateway.boundary import RequestBoundary, identity_of
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
from tandem_services.gateway.output_dialect import OutputDialect
from tandem_services.gateway.prompts import PromptEncoder
from tandem_services.gateway.quarantine import Board, Quarantine
from tandem_services.gateway.queueing.admission import Admission, AdmissionPolicy
from tandem_services.gateway.queueing.fair_queue import FairQueue
from tandem_services.gateway.queueing.queue_metrics import QueueMetrics
from tandem_services.gateway.queueing.shared_counters import Board as FairBoard
from tandem_services.gateway.queueing.shared_counters import SharedCounters
from tandem_services.gateway.responses.planner import ResponsesPlanner
from tandem_services.gateway.retry_budget import RetryBudget
from tandem_services.gateway.revival import Revival
from tandem_services.gateway.session_routes import SessionRoutes
from tandem_services.gateway.session_turns import SessionDesk, SessionDirectory
from tandem_services.gateway.tokenization import Tokenization
from tandem_services.router.virtual_counters import VirtualCounters

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
TOKENIZER_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
METRICS_PATH = "/metrics"
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
    access: Access | None
    """None: everybody may do everything."""
    health: Health
    clock: Clock
    strict_fields: bool
    """Requests with fields that nobody knows are refused."""

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs as long as the gateway serves, by name."""
        work = {
            "quarantine": self.dispatcher.quarantine.run(),
            "virtual token counters": self.dispatcher.admission.counters.run(),
        }
        if self.access is not None:
            work["api keys"] = self.access.keys.run()
            work["leases of requests"] = self.access.limits.run()
        return work

    async def close(self) -> None:
        """Stop what the gateway itself started. Running requests have ended."""
        await self.dispatcher.admission.close()
        await self.dispatcher.settle()
        if self.access is not None:
            await self.access.limits.close()
        self.engines.close()
        self.executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Boards:
    """What all gateways of a deployment share through Redis. None: this gateway keeps it for itself."""

    quarantine: Board | None = None
    usage: UsageBoard | None = None
    fairness: FairBoard | None = None


ALONE = Boards()


def build_gateway(
    config: GatewayConfig,
    chooser: PairChooser,
    sessions: SessionDirectory,
    context: IpcContext,
    tokenizer: TextTokenizer,
    *,
    clock: Clock,
    health: Health,
    boards: Boards = ALONE,
) -> Gateway:
    """Compose the parts. The caller owns what it passes, and closes it after the gateway.

    Raises `ConfigError` for a key file that is no good.
    """
    registry = new_registry()
    metrics = GatewayMetrics(registry, model=config.model_name)
    dialect = OutputDialect.of(
        tokenizer, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )
    model = ServedModel(name=config.model_name, tokenizer=tokenizer, dialect=dialect, workers=chooser.workers)
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
        admission=_admission(config, chooser, boards.fairness, registry, clock),
        quarantine=Quarantine(
            clock=clock, metrics=metrics, salt=_salt(context, config.cluster), board=boards.quarantine
        ),
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
        access=_access(config, registry, boards.usage, _salt(context, config.cluster), clock),
        health=health,
        clock=clock,
        strict_fields=config.strict_fields,
    )


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
        cache_secret=blake2b(b"prefix cache", key=secret, digest_size=32).digest(),
        admin_paths=(METRICS_PATH,),
    )


def _admission(
    config: GatewayConfig, chooser: PairChooser, board: FairBoard | None, registry: CollectorRegistry, clock: Clock
) -> Admission:
    counters = VirtualCounters()
    # Without keys there is one tenant, and nothing to share out.
    board = None if config.api_keys is None else board
    return Admission(
        chooser=chooser,
        clock=clock,
        queue=FairQueue(seats=config.max_waiting, counters=counters),
        counters=SharedCounters(counters=counters, board=board),
        metrics=QueueMetrics(registry),
        policy=AdmissionPolicy(room_s=config.room_s, worker_s=config.queue_s, worker_wait_s=config.worker_wait_s),
    )


def _retry_policy(config: GatewayConfig) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=config.max_attempts,
        recovery_s=config.recovery_s,
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
    boards: Boards = ALONE,
) -> FastAPI:
    """A gateway and its application: see `build_gateway` and `api_app`."""
    gateway = build_gateway(
        config,
        chooser,
        sessions,
        context,
        tokenizer,
        clock=clock or MonotonicClock(),
        health=health or Health(),
        boards=boards,
    )
    return api_app(gateway, metrics=config.admin_port is None)


def api_app(gateway: Gateway, *, metrics: bool) -> FastAPI:
    """The ASGI application of users; `metrics`: with /metrics. Its life is the gateway's.

    What the gateway was built with must be started, and outlives the application. Whoever ends it calls
    `health.drain()` some time before.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        background = [asyncio.create_task(work, name=name) for name, work in gateway.background().items()]
        yield
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await gateway.close()

    app = FastAPI(
        title="Tandem",
        version=version("tandem"),
        lifespan=lifespan,
        middleware=[boundary_of(gateway), Middleware(Authentication, access=gateway.access)],
        # A redirect would answer `/v1/models/` differently from what access rules see.
        redirect_slashes=False,
        openapi_url=None,
    )
    app.add_exception_handler(HTTPException, http_error)
    app.router.routes.extend(_generation_routes(gateway))
    app.router.routes.extend(_tokenizer_routes(gateway))
    app.router.routes.extend(gateway.sessions.routes())
    _add_model_routes(app, gateway)
    app.router.routes.extend(operations_routes(gateway, metrics=metrics))
    return app


def boundary_of(gateway: Gateway) -> Middleware:
    """The outermost layer of each of its applications."""
    return Middleware(
        RequestBoundary,
        clock=gateway.clock,
        metrics=gateway.metrics,
        health=gateway.health,
        endpoints=LABELLED_PATHS,
    )


def _generation_routes(gateway: Gateway) -> list[Route]:
    desk = gateway.sessions.desk
    strict = gateway.strict_fields
    chats = ChatPlanner(gateway.prompts, desk, strict=strict)
    planners = (chats, CompletionPlanner(gateway.prompts, desk, strict=strict), ResponsesPlanner(chats, strict=strict))
    embeddings = EmbeddingEndpoint(gateway.prompts, gateway.answering, strict=strict)
    return [Route(EmbeddingEndpoint.path, embeddings, methods=["POST"])] + [
        Route(planner.endpoint, GenerationEndpoint(planner, gateway.answering), methods=["POST"])
        for planner in planners
    ]


def _tokenizer_routes(gateway: Gateway) -> list[Route]:
    tokenization = Tokenization(gateway.prompts, strict=gateway.strict_fields)
    return [
        Route(path, tokenization.detokenize if "detokenize" in path else tokenization.tokenize, methods=["POST"])
        for path in TOKENIZER_PATHS
    ]


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/v1/models", methods=READ)
    async def list_models(request: Request) -> Response:
        return json_response(gateway.model.listing(identity_of(request.scope).caller))

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def get_model(name: str, request: Request) -> Response:
        gateway.model.check_name(name, identity_of(request.scope).caller)
        return json_response(gateway.model.card())

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
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        report = gateway.health.report()
        return json_response(report, report.http_status)

    async def get_version(_: Request) -> Response:
        return json_response({"version": version("tandem")})

    async def get_metrics(_: Request) -> Response:
        return Response(render(gateway.registry), headers={"content-type": CONTENT_TYPE})

    answers = {"/live": live, "/ready": ready, "/health": ready, "/version": get_version}
    if metrics:
        answers[METRICS_PATH] = get_metrics
    return [Route(path, answer, methods=READ) for path, answer in answers.items()]


def json_response(document: object, status: int = 200) -> Response:
    return Response(encode_json(document), status, media_type="application/json")


async def http_error(_: Request, error: Exception) -> Response:
    """Routing's own refusals (404, 405) in OpenAI's shape."""
    assert isinstance(error, HTTPException), type(error)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    refusal = ApiError(error.status_code, error.detail, kind=kind)
    return Response(error_json(refusal), error.status_code, error.headers, "application/json")
