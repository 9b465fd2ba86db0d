"""Running a gateway: router, sockets, HTTP server, in this order; stopped in the reverse one.

A SIGTERM or SIGINT ends it:

    1. notice   /ready answers 503 and every answer closes its connection, but requests are still served: load
                balancers learn from /ready, a moment later, to send no more (RELIABILITY B2.11)
    2. closing  the port closes; requests that run may finish within the drain time
    3. end      exit status 0

A second signal ends the notice; a SIGINT while closing ends the wait for running requests.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.applications import Starlette

from tandem_engine.clock import MonotonicClock
from tandem_engine.ipc.channels import IpcContext, KeyPair
from tandem_engine.logs import configure_logging
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.app import Boards, Gateway, api_app, build_gateway
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.connection import GatewayConnection
from tandem_services.router.router import Router, RouterConfig

__all__ = ["GatewayConfig", "serve"]

logger = logging.getLogger(__name__)

BACKLOG = 2048
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: GatewayConfig) -> int:
    """Serve until a signal. Returns the exit status. Raises `StartupError`, `ConfigError`, `CheckpointError`."""
    configure_logging(config.log_format, level=config.log_level)
    tokenizer = TextTokenizer.load(config.model_path)
    keys = None if config.curve_keys is None else KeyPair.load(config.curve_keys)
    with ExitStack() as listeners:
        api = listeners.enter_context(listen(config.host, config.port))
        admin = None
        if config.admin_port is not None:
            admin = listeners.enter_context(listen(config.admin_host, config.admin_port))
        uvloop.run(_serve(config, tokenizer, keys, api, admin))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `StartupError` when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it: a token must not wait for the acknowledgement of the last one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port} ({error}): choose another --host or --port") from error
    listener.listen(BACKLOG)
    return listener


class GatewayServer(uvicorn.Server):
    """Gives notice before it closes, and ends with status 0: uvicorn alone raises the signal again at the end."""

    def __init__(self, config: uvicorn.Config, health: Health, *, notice_s: float) -> None:
        super().__init__(config)
        self._health = health
        self._notice_s = notice_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.end, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def end(self, number: signal.Signals) -> None:
        """What a signal does. Called on the event loop."""
        if self._health.draining:
            self.handle_exit(number, None)
            return
        self._drain(number.name)

    def end_by_order(self) -> None:
        """What an administrator's order to drain does: a second one nothing more."""
        if not self._health.draining:
            self._drain("order")

    def _drain(self, cause: str) -> None:
        logger.info("gateway drains", extra={"fields": {"cause": cause, "notice_s": self._notice_s}})
        self._health.drain()
        asyncio.get_running_loop().call_later(self._notice_s, self._close)

    def _close(self) -> None:
        self.should_exit = True


def http_server(app: FastAPI, config: GatewayConfig, health: Health) -> GatewayServer:
    """The HTTP server of a gateway; run it with `serve(sockets=[...])`. `health` is the application's."""
    return GatewayServer(_uvicorn_config(app, config), health, notice_s=config.drain_notice_s)


def _uvicorn_config(app: Starlette, config: GatewayConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GatewayConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(config.drain_timeout_s),
    )


class AdminServer(uvicorn.Server):
    """The server of the administrators' port. It knows no signals: it ends after the API's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _admin_server(
    gateway: Gateway, server: GatewayServer, config: GatewayConfig, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Serves the administrators' port, if there is one, for as long as the block lasts."""
    if listener is None:
        yield
        return
    admin = AdminServer(_uvicorn_config(create_admin_app(gateway, drain=server.end_by_order), config))
    serving = asyncio.create_task(admin.serve(sockets=[listener]), name="admin")
    fields = {"host": config.admin_host, "port": config.admin_port}
    logger.info("administrators' routes are served", extra={"fields": fields})
    try:
        yield
    finally:
        admin.should_exit = True
        await serving


async def _serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    keys: KeyPair | None,
    listener: socket.socket,
    admin_listener: socket.socket | None,
) -> None:
    router = Router(
        RouterConfig(
            redis=config.redis,
            cluster=config.cluster,
            local_prefill_tokens=config.local_prefill_tokens,
            policies=config.policies,
        )
    )
    context = IpcContext(keys)
    boards = Boards(quarantine=router.quarantine, usage=router.usage, fairness=router.fairness)
    health = Health()
    try:
        # A key file that is no good is told at once, without waiting for Redis.
        gateway = build_gateway(
            config, router, router.sessions, context, tokenizer, clock=MonotonicClock(), health=health, boards=boards
        )
        await router.start()
        server = http_server(api_app(gateway, metrics=admin_listener is None), config, health)
        if gateway.access is None:
            logger.info("no --api-keys: everybody who reaches this gateway may use it")
        logger.info("gateway listens", extra={"fields": {"host": config.host, "port": config.port}})
        async with _admin_server(gateway, server, config, admin_listener):
            await server.serve(sockets=[listener])
    except RedisUnavailableError as error:
        raise StartupError(str(error)) from error
    finally:
        await router.stop()
        context.close()
