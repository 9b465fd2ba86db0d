"""The gRPC port of a stand-alone router: its own service, external processing, health and reflection.

Health is reported per service, as the endpoint-picker protocol requires: `liveness` while the process answers, all
others as /ready.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health
from grpc_reflection.v1alpha import reflection

from tandem_engine.base.addresses import EVERY_ADDRESS, Address
from tandem_engine.base.errors import ConfigError
from tandem_services.common.errors import ApiError, StartupError, bad_request
from tandem_services.common.health import Health
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.api.openai_schemas import ChatMessage
from tandem_services.gateway.limits import MAX_BODY_BYTES
from tandem_services.router.decision import PlannedFetch, WorkerView
from tandem_services.router_server import ext_proc
from tandem_services.router_server.ext_proc import ExternalProcessor
from tandem_services.router_server.http_api import RouterApi

# Descriptors that reflection finds by name in the pool.
from tandem_services.router_server.protos import router_pb2  # noqa: F401
from tandem_services.router_server.protos import router_pb2 as pb
from tandem_services.router_server.schemas import DEFAULT_MAX_TOKENS, ChoiceRecord, ChooseAsk, ChosenRoute

CODES: dict[int, Any] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's names for the statuses of `ApiError`; any other is INTERNAL."""


def ask_of(request: pb.ChooseRequest) -> ChooseAsk:
    """Raises `ApiError` 400 for messages that are none."""
    kind = request.WhichOneof("prompt")
    return ChooseAsk(
        model=request.model,
        token_ids=[*request.token_ids.ids] if kind == "token_ids" else None,
        prompt=request.text if kind == "text" else None,
        messages=_messages(request.messages) if kind == "messages" else None,
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        request_id=request.request_id,
        session=request.session,
        cache_salt=request.cache_salt,
        priority=request.priority,
        exclude=[*request.exclude],
        for_gateway=request.for_gateway,
        return_token_ids=request.return_token_ids,
    )


def chosen(route: ChosenRoute) -> pb.ChooseResponse:
    return pb.ChooseResponse(
        reservation=route.reservation,
        expires_in_s=route.expires_in_s,
        placement=route.placement,
        source=route.source,
        decode=worker(route.decode),
        prefill=None if route.prefill is None else worker(route.prefill),
        fetch=None if route.fetch is None else _fetch(route.fetch),
        prompt_tokens=route.prompt_tokens,
        matched_tokens=route.matched_tokens,
        predicted_s=route.predicted_s,
        terms=[pb.Term(name=term.name, seconds=term.seconds) for term in route.terms],
        has_room=route.has_room,
        for_gateway=route.for_gateway,
        token_ids=route.token_ids or (),
    )


def worker(view: WorkerView) -> pb.Worker:
    return pb.Worker(
        worker_id=view.worker_id,
        incarnation=view.incarnation,
        role=view.role.value,
        request_endpoint=view.request_endpoint,
        peer_endpoint=view.peer_endpoint,
        compat_hash=view.compat_hash,
        context_length=view.context_length,
        page_size=view.page_size,
        model=view.model,
    )


def explained(record: ChoiceRecord) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request_id=record.request_id,
        model=record.model,
        interface=record.interface,
        state=record.state,
        age_s=record.age_s,
        choice=chosen(record.choice),
    )


def status_of(error: ApiError) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """Code, sentence and trailing metadata: `retry-after` in seconds, as in HTTP."""
    after = () if error.retry_after is None else (("retry-after", str(max(1, math.ceil(error.retry_after)))),)
    return CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error), after


def _fetch(fetch: PlannedFetch) -> pb.Fetch:
    return pb.Fetch(source=worker(fetch.source), tokens=fetch.tokens, seconds=fetch.seconds, within_s=fetch.within_s)


def _messages(given: pb.Messages) -> list[ChatMessage]:
    fields = [{"role": message.role, "content": message.content} for message in given.messages]
    try:
        return msgspec.convert(fields, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise bad_request(f"messages: {error}", "messages") from error


logger = logging.getLogger(__name__)
SERVICE = "tandem.router.v1.Router"
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Method = Callable[[Ask], Awaitable[Answer]]


class RouterService:
    """One method for each of the service's. Each raises `ApiError`, which `handler` turns into a status."""

    def __init__(self, api: RouterApi) -> None:
        self._api = api

    def handler(self) -> Any:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        methods: dict[str, tuple[Method[Any, Any], Any]] = {
            "Choose": (self._choose, pb.ChooseRequest),
            "Release": (self._release, pb.ReleaseRequest),
            "ListWorkers": (self._list_workers, pb.ListWorkersRequest),
            "Explain": (self._explain, pb.ExplainRequest),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    self._guarded(method),
                    request_deserializer=ask.FromString,
                    response_serializer=lambda answer: answer.SerializeToString(),
                )
                for name, (method, ask) in methods.items()
            },
        )

    def _guarded(self, method: Method[Ask, Answer]) -> Callable[[Ask, Any], Awaitable[Answer]]:
        async def call(ask: Ask, context: Any) -> Answer:
            try:
                self._api.check_token(_authorization(context))
                return await method(ask)
            except ApiError as error:
                code, sentence, metadata = status_of(error)
                await context.abort(code, sentence, metadata)
                raise

        return call

    async def _choose(self, request: pb.ChooseRequest) -> pb.ChooseResponse:
        return chosen(await self._api.choose(ask_of(request), interface="grpc"))

    async def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(released=await self._api.routing.release(request.reservation))

    async def _list_workers(self, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=map(worker, self._api.workers(request.model).workers))

    async def _explain(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        return explained(self._api.explain(request.id))


def _authorization(context: Any) -> str | None:
    given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    return str(given[0]) if len(given) == 1 else None


HEALTH_EVERY_S = 0.5
LIVENESS = "liveness"
READINESS = ("", "readiness", ext_proc.SERVICE, SERVICE)
MESSAGE_MARGIN = 64 << 10

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES + MESSAGE_MARGIN),
    # Two routers on one port would each get half of the requests, and a port that is taken would go unnoticed.
    ("grpc.so_reuseport", 0),
)


@dataclass(kw_only=True, slots=True)
class GrpcServer:
    """gRPC API of the router. `start`, then `run` with everything else, then `stop`."""

    api: RouterService
    processor: ExternalProcessor
    health: Health
    host: str
    port: int
    """0: any that is free; after `start` the one it is."""
    credentials: Any = None
    """None: no TLS."""
    _server: Any = field(default=None, init=False)
    _reporter: grpc_health.HealthServicer = field(default_factory=grpc_health.HealthServicer, init=False)

    async def start(self) -> None:
        """Raises `StartupError` when the port is taken."""
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((self.api.handler(), self.processor.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._reporter, server)
        names = (ext_proc.SERVICE, SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        # gRPC takes :: as `common.sockets.listen` does.
        address = str(Address(self.host or EVERY_ADDRESS, self.port))
        try:
            if self.credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self.credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: choose another --host or --grpc-port") from error
        await self._reporter.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.report()
        await server.start()
        self._server = server

    async def run(self) -> None:
        """Report health as it changes, until canceled."""
        failure = "cannot report the health of the gRPC services"
        await run_periodically(self.report, every_s=HEALTH_EVERY_S, logger=logger, failure=failure)

    async def report(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self.health.report().ok else status.NOT_SERVING
        for name in READINESS:
            await self._reporter.set(name, now)

    async def stop(self, grace_s: float) -> None:
        """Requests that run have `grace_s` to end."""
        if self._server is not None:
            await self._server.stop(grace_s)


def tls_credentials(cert: Path | None, key: Path | None) -> Any:
    """None without TLS. Raises `ConfigError`."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together")
    try:
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except OSError as error:
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {error.strerror}") from error
