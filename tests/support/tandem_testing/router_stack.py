"""A stand-alone router that listens on both of its ports, and gateways on mock engines that redeem its tickets.

Workers report to a `Fleet` whose reports are `LASTING`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.health import Health
from tandem_services.common.sockets import listen
from tandem_services.gateway.app import api_app, build_gateway
from tandem_services.gateway.serve import http_server as gateway_http_server
from tandem_services.router.router import Router
from tandem_services.router_server.config import RouterServerConfig, TokenizedModel
from tandem_services.router_server.serve import RouterServer, build_router_server, http_server
from tandem_testing.gateway_builders import PATIENCE_S, EngineRack, config_of, fleet_of
from tandem_testing.mock_engine import MockEngine
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import Fleet, make_record, patient_router
from tandem_testing.tokenizer_builders import write_tokenizer

MODEL = "m"
ALIAS = "m-alias"


@dataclass(kw_only=True)
class LiveRouter:
    """A stand-alone router, and clients of it."""

    server: RouterServer
    router: Router
    http: httpx.AsyncClient
    channel: Any
    """Of the gRPC port."""


async def report(fleet: Fleet, engine: MockEngine, **changes: Any) -> None:
    """One heartbeat of an engine's worker."""
    record = make_record(engine.view.worker_id, **changes)
    await fleet.beat(replace(record, view=replace(engine.view, model=MODEL)))


@asynccontextmanager
async def serving(app_server: Any, health_path: str = "/live") -> AsyncIterator[str]:
    """Run an HTTP server on a free port until the block ends. Yields its URL."""
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        task = asyncio.create_task(app_server.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                await client.get(f"http://{host}:{port}{health_path}")
            yield f"http://{host}:{port}"
        finally:
            app_server.should_exit = True
            await task


@asynccontextmanager
async def live_router(redis: RedisServer, folder: Path, **config: Any) -> AsyncIterator[LiveRouter]:
    """With the tokenizer of `MODEL` in `folder`."""
    router = patient_router(redis)
    await router.start()
    models = (TokenizedModel((MODEL, ALIAS), folder),)
    settings = RouterServerConfig(models=models, grpc_port=0, drain_notice_s=0.0, **config)
    tokenizers = {folder: TextTokenizer.load(write_tokenizer(folder))}
    health = Health()
    parts = (settings, router, router.sessions, tokenizers)
    server = build_router_server(*parts, clock=MonotonicClock(), health=health)
    await server.grpc.start()
    try:
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(serving(http_server(server, settings)))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc.port}"))
            yield LiveRouter(server=server, router=router, http=http, channel=channel)
    finally:
        await server.grpc.stop(0.0)
        await server.close()
        await router.stop()


@asynccontextmanager
async def live_gateway_of(redis: RedisServer, rack: EngineRack, folder: Path, **config: Any) -> AsyncIterator[str]:
    """A gateway with a router of its own on the same Redis. Yields its URL."""
    router = patient_router(redis)
    await router.start()
    settings = config_of(path=folder, names=(MODEL, ALIAS), **config)
    health = Health()
    boards = {"quarantine": router.quarantine, "fairness": router.fairness}
    tokenizer = TextTokenizer.load(write_tokenizer(folder))
    fleet = fleet_of(settings, router, router.sessions, rack.context, tokenizer, **boards)
    gateway = build_gateway(settings, [fleet], clock=MonotonicClock(), health=health, usage=router.usage)
    try:
        async with serving(gateway_http_server(api_app(gateway, metrics=True), settings, health)) as url:
            yield url
    finally:
        await router.stop()
