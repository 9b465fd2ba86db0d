"""Runs a stand-alone router: `Router`, HTTP server and gRPC server, stopped in reverse order.

SIGTERM, SIGINT or SIGHUP shuts it down as a gateway: first /ready and gRPC health change, then the HTTP port closes,
then the gRPC port. Running exchanges may finish within the drain time. Reservations are released at the end.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.base.logs import configure_logging
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.metrics import new_registry
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.sockets import listen
from tandem_services.common.tokens import BearerToken
from tandem_services.gateway.access.keys import KeyWatch, cache_secret, deployment_secret
from tandem_services.gateway.access.tenants import AccessMetrics
from tandem_services.gateway.dispatch.sessions import SessionDirectory, SessionManager
from tandem_services.gateway.http.connection import GatewayConnection
from tandem_services.gateway.models.fleet_tokenizer import FleetTokenizer
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.models.prompts import PromptEncoder
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoads
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads
from tandem_services.gateway.output.reader import OutputDialect
from tandem_services.gateway.serve import LAST_WORDS_S, GatewayServer
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_services.router.router import Router, RouterConfig
from tandem_services.router.shared_state import TokenizerCopy
from tandem_services.router_server.config import RouterServerConfig, TokenizedModel
from tandem_services.router_server.endpoint_picker import EndpointPicker, GatewayEndpoints, gateway_address
from tandem_services.router_server.ext_proc import MAX_BODIES_BYTES, ExternalProcessor
from tandem_services.router_server.grpc_server import GrpcServer, RouterService, tls_credentials
from tandem_services.router_server.http_api import RouterApi, http_app
from tandem_services.router_server.request_reading import ModelReader, RequestReading
from tandem_services.router_server.routing_service import Chooser, Holds, Places, RouterMetrics, RoutingService
from tandem_services.router_server.worker_tokenizers import WorkerTokenizers

logger = logging.getLogger(__name__)

SESSION_TTL_S = 600.0
"""Sessions are looked up here and never written: this is not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterServer:
    """The parts of a stand-alone router."""

    app: Starlette
    api: RouterApi
    grpc: GrpcServer
    routing: RoutingService
    picker: EndpointPicker
    endpoints: GatewayEndpoints
    health: Health
    tokenizing: TokenizerThreads
    accept: Callable[[TokenizedModel, TextTokenizer], None]
    """Reads for a model with this tokenizer from now on."""

    async def close(self) -> None:
        """Give back what is held. Running requests have ended."""
        await self.picker.background.settle()
        await self.routing.background.settle()
        await self.routing.holds.close()
        self.tokenizing.close()


def serve(config: RouterServerConfig) -> int:
    """Serve until a signal. Returns the exit status. Raises `StartupError`, `ConfigError`, `CheckpointError`."""
    configure_logging(config.log_format, level=config.log_level)
    paths = {model.path for model in config.models if model.path is not None}
    tokenizers = {path: TextTokenizer.load(path) for path in paths}
    uvloop.run(_serve(config, tokenizers))
    return 0


def build_router_server(
    config: RouterServerConfig,
    router: Chooser,
    sessions: SessionDirectory,
    tokenizers: Mapping[Path, TextTokenizer],
    *,
    clock: Clock,
    health: Health,
) -> RouterServer:
    """Compose the parts. The caller owns the router, and closes it afterwards.

    Raises `ConfigError` for files that are no good.
    """
    registry = new_registry()
    metrics = RouterMetrics(registry)
    tokenizing = TokenizerThreads(long_threads=config.tokenizer_threads)
    routing = RoutingService(
        router=router,
        holds=Holds(
            router=router,
            clock=clock,
            ttl_s=config.reservation_ttl_s,
            capacity=config.max_held,
            remembered=config.explain_records,
        ),
        clock=clock,
        metrics=metrics,
        worker_wait_s=config.worker_wait_s,
    )
    session_manager = SessionManager(directory=sessions, ttl_s=SESSION_TTL_S, turn_s=SESSION_TTL_S)
    awaited = {name: model.names[0] for model in config.models for name in model.names}
    reading = RequestReading(models={}, awaited=awaited)

    def accept(model: TokenizedModel, tokenizer: TextTokenizer) -> None:
        special = config.parse_special_tokens
        reading.add(_reader(model, tokenizer, router, tokenizing, session_manager, parse_special_tokens=special))

    for model in config.models:
        if model.path is not None:
            accept(model, tokenizers[model.path])
    api = RouterApi(
        routing=routing,
        reading=reading,
        places=Places(most=config.max_choosing, what="requests"),
        clock=clock,
        metrics=metrics,
        token=None if config.token_file is None else BearerToken(path=config.token_file),
    )
    endpoints = GatewayEndpoints(
        places=tuple(map(gateway_address, config.gateways)), clock=clock, random=Random(), metrics=metrics
    )
    access_metrics = AccessMetrics(registry)
    picker = EndpointPicker(
        routing=routing,
        reading=reading,
        endpoints=endpoints,
        metrics=metrics,
        clock=clock,
        keys=_key_watch(config, access_metrics),
        access_metrics=access_metrics,
        cache_secret=_cache_secret(config),
    )
    grpc = GrpcServer(
        api=RouterService(api),
        processor=ExternalProcessor(
            picker=picker,
            places=Places(most=config.max_exchanges, what="requests of an Inference Gateway"),
            memory=Places(most=MAX_BODIES_BYTES, what="bytes of request bodies"),
            metrics=metrics,
        ),
        health=health,
        host=config.host,
        port=config.grpc_port,
        credentials=tls_credentials(config.tls_cert, config.tls_key),
    )
    health.add_check("workers", lambda: None if router.workers() else "no worker is registered")
    health.add_check("gateways", endpoints.failure)

    def background() -> dict[str, Coroutine[Any, Any, None]]:
        work = {"reservations": routing.holds.run(), "gRPC health": grpc.run()}
        if endpoints.places:
            work["gateways"] = endpoints.run()
        if picker.keys is not None:
            work["api keys"] = picker.keys.run()
        return work

    hosts = AllowedHosts.of(config.allowed_hosts, listening=(config.host,))
    app = http_app(api, health=health, registry=registry, background=background, hosts=hosts)
    return RouterServer(
        app=app,
        api=api,
        grpc=grpc,
        routing=routing,
        picker=picker,
        endpoints=endpoints,
        health=health,
        tokenizing=tokenizing,
        accept=accept,
    )


def http_server(server: RouterServer, config: RouterServerConfig) -> GatewayServer:
    """The HTTP server; run it with `serve(sockets=[...])`."""
    settings = uvicorn.Config(
        server.app,
        http=GatewayConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + 2 * LAST_WORDS_S),
    )
    return GatewayServer(settings, server.health, notice_s=config.drain_notice_s, drain_s=config.drain_timeout_s)


def _reader(
    config: TokenizedModel,
    tokenizer: TextTokenizer,
    router: Chooser,
    tokenizing: TokenizerThreads,
    sessions: SessionManager,
    *,
    parse_special_tokens: bool,
) -> ModelReader:
    dialect = OutputDialect.of(tokenizer)
    model = ServedModel(names=config.names, tokenizer=tokenizer, dialect=dialect, workers=router.workers)
    prompts = PromptEncoder(model=model, threads=tokenizing, parse_special_tokens=parse_special_tokens)
    return ModelReader(model=model, prompts=prompts, session_manager=sessions)


def _key_watch(config: RouterServerConfig, metrics: AccessMetrics) -> KeyWatch | None:
    if config.api_keys is None:
        return None
    keys = KeyWatch(path=config.api_keys, metrics=metrics)
    keys.start()
    return keys


def _key_pair(config: RouterServerConfig) -> KeyPair | None:
    return None if config.curve_keys is None else KeyPair.load(config.curve_keys)


def _cache_secret(config: RouterServerConfig) -> bytes:
    return cache_secret(deployment_secret(_key_pair(config), config.cluster))


@asynccontextmanager
async def _worker_tokenizers(config: RouterServerConfig, router: Router, server: RouterServer) -> AsyncIterator[None]:
    """Looks for them until the block ends."""
    keys = _key_pair(config)
    deployment, context = Deployment.of(keys), IpcContext(keys)
    loads = TokenizerLoads(clock=MonotonicClock(), on_failure=server.routing.metrics.tokenizer_failed)

    def source(model: TokenizedModel) -> FleetTokenizer:
        name = model.names[0]
        place = Keys(config.cluster, deployment.namespace)
        copy = TokenizerCopy(redis=config.redis, keys=place, deployment=deployment, model=name)
        return FleetTokenizer(model=name, context=context, copy=copy, loads=loads)

    models = tuple(model for model in config.models if model.path is None)
    tokenizers = WorkerTokenizers(models=models, fleet=router, source=source, accept=server.accept, loads=loads)
    looking = asyncio.create_task(tokenizers.run())
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        context.close()


async def _serve(config: RouterServerConfig, tokenizers: Mapping[Path, TextTokenizer]) -> None:
    router = Router(
        RouterConfig(
            redis=config.redis,
            cluster=config.cluster,
            deployment=Deployment.of(_key_pair(config)),
            local_prefill_tokens=config.local_prefill_tokens,
            policies=config.policies,
        )
    )
    server = None
    try:
        with closing(listen(config.host, config.port)) as listener:
            health = Health()
            server = build_router_server(
                config, router, router.sessions, tokenizers, clock=MonotonicClock(), health=health
            )
            await router.start()
            await server.grpc.start()
            if config.token_file is None:
                logger.info("authentication is disabled: --token-file is not set; any client of this router can use it")
            fields = {"host": config.host, "port": config.port, "grpc_port": server.grpc.port}
            logger.info("router listening", extra={"fields": fields})
            async with _worker_tokenizers(config, router, server):
                await http_server(server, config).serve(sockets=[listener])
            await server.grpc.stop(config.drain_timeout_s)
    except RedisUnavailableError as error:
        raise StartupError(str(error)) from error
    finally:
        if server is not None:
            await server.grpc.stop(0.0)
            await server.close()
        await router.stop()
