"""Runs a gateway: starts router, sockets and HTTP server in this order, and stops them in reverse.

SIGTERM, SIGINT or SIGHUP shuts it down:

    1. notice    /ready returns 503 and every response closes its connection, but requests are still served: load
                 balancers stop sending a moment after they see /ready [drain-loses-nothing]
    2. closing   the port closes; running requests may finish within the drain time
    3. ended     remaining requests get an error: a stream as its last event, any other response as a 503
    4. exit      status 0

A second signal ends the notice; a SIGINT while closing ends the running requests. SIGHUP acts as SIGTERM, unless it is
ignored, as under `nohup`.
"""

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from tandem_engine.base.addresses import Address, is_loopback, is_wildcard
from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.logs import configure_logging
from tandem_engine.base.thread_pools import start_background_threads
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import StartupError
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.sockets import BACKLOG, listen
from tandem_services.common.tasks import ending_signals
from tandem_services.common.tokens import TokenFile
from tandem_services.common.tracing import require_opentelemetry
from tandem_services.gateway.admin import create_admin_app
from tandem_services.gateway.app import Gateway, api_app, build_gateway
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.console.fleet_document import (
    FleetDocument,
    GatewayFigures,
    ViewedFleet,
    fleet_document,
    latest_errors,
    latest_requests,
)
from tandem_services.gateway.console.fleet_history import FleetHistory
from tandem_services.gateway.console.latency_rows import latency_rows
from tandem_services.gateway.console.routes import Console, SharedDocument
from tandem_services.gateway.fleets import HomeFleet, OpenFleets, RoutedFleet, key_pair_of, load_tokenizers
from tandem_services.gateway.http.accepting import Acceptor, needs_acceptor
from tandem_services.gateway.http.body import body_parser
from tandem_services.gateway.http.connection import GatewayConnection, end_one
from tandem_services.gateway.http.interruption import Closing
from tandem_services.gateway.models.catalog import LiveModels
from tandem_services.gateway.models.file import ModelsFileMetrics, ModelsWatch
from tandem_services.gateway.models.independent import Entries, FileEntries, IndependentModels, OneEntry
from tandem_services.gateway.models.tokenizer_loads import counted_loads
from tandem_services.gateway.process_place import ProcessPlace
from tandem_services.gateway.processes.front import Front

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport


def console_of(gateway: Gateway, fleets: Callable[[], Sequence[ViewedFleet]]) -> Console:
    """`fleets`: those of its models now."""
    journal, started = gateway.answering.journal, gateway.clock.now()
    figures = GatewayFigures(
        health=gateway.health,
        running=lambda: journal.running,
        waiting=lambda: sum(len(service.dispatcher.placing.admission.binding.queue) for service in gateway.models),
        journal=journal,
        latency=lambda: latency_rows(gateway.models, journal),
        uptime_s=lambda: gateway.clock.now() - started,
        requires_key=gateway.access is not None,
    )

    def fleet() -> FleetDocument:
        return fleet_document(fleets(), figures)

    return Console(
        fleet=SharedDocument(build=fleet, clock=gateway.clock),
        errors=SharedDocument(build=lambda: latest_errors(journal), clock=gateway.clock),
        history=FleetHistory(look=fleet, clock=gateway.clock),
        requests=SharedDocument(build=lambda: latest_requests(journal), clock=gateway.clock),
        journal=journal,
    )


__all__ = ["GatewayConfig", "ModelConfig", "listen", "serve"]
logger = logging.getLogger(__name__)
SERVICE = "tandem-gateway"

LAST_WORDS_S = 2.0
"""For the last events of what is ended: a client that does not read them by then is cut off."""

IDLE_S = 1.0
"""A connection that waited so long for its next request may be closed for others when file descriptors are short."""

TURN_S = 0.0005
"""A thread that renders a long chat gives the interpreter back to the event loop within this time, instead of 5 ms."""


def serve(config: GatewayConfig) -> int:
    """Serve until a signal. Returns the exit status. Raises `StartupError`, `ConfigError`, `CheckpointError`."""
    configure_logging(config.log_format, level=config.log_level, shared=config.place is not None)
    if config.tracing is not None:
        require_opentelemetry()
    # Before there is an event loop that it could hold up.
    tokenizers = load_tokenizers(config.models)
    keys = {model.name: key_pair_of(model) for model in config.models}
    with ExitStack() as listeners:
        api = listeners.enter_context(_api_listener(config))
        admin = None
        if config.place is not None:
            admin = listeners.enter_context(_admin_socket(config.place))
        elif config.admin_port is not None:
            flags = "--admin-host or --admin-port"
            admin = listeners.enter_context(listen(config.admin_host, config.admin_port, flags=flags))
        spans = listeners.enter_context(_spans(config))
        uvloop.run(_serve(config, tokenizers, keys, api, admin, spans))
    return 0


def _api_listener(config: GatewayConfig) -> socket.socket:
    return listen(config.host, config.port) if config.place is None else socket.socket(fileno=config.place.listener)


def _admin_socket(place: ProcessPlace) -> socket.socket:
    """In a folder that only this user can open. It has its name when it is served."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    place.new_socket.unlink(missing_ok=True)
    listener.bind(str(place.new_socket))
    listener.listen(BACKLOG)
    return listener


@contextmanager
def _spans(config: GatewayConfig) -> Iterator["SpanExport | None"]:
    """Exports traces; sends the last ones after the end of the event loop, which they would block."""
    if config.tracing is None:
        yield None
        return
    from tandem_services.common.span_export import SpanExport  # needs OpenTelemetry

    with closing(SpanExport(config.tracing, service=SERVICE, instance=uuid.uuid4().hex)) as export:
        yield export


class GatewayServer(uvicorn.Server):
    """Gives notice before it closes, and ends with status 0: uvicorn alone raises the signal again at the end."""

    def __init__(
        self,
        config: uvicorn.Config,
        health: Health,
        *,
        notice_s: float,
        drain_s: float,
        closing: Closing | None = None,
    ) -> None:
        """`drain_s`: after the notice, `closing` ends what still runs then. The wait of `config` must be longer."""
        super().__init__(config)
        self._health = health
        self._notice_s = notice_s
        self._drain_s = drain_s
        self._closing = closing or Closing()
        self._acceptor: Acceptor | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with an `Acceptor` in place of the event loop's servers where descriptors may become short."""
        if not needs_acceptor():
            await super().startup(sockets)
            return
        await super().startup(sockets=[])
        make: Any = self.config.http_protocol_class
        protocol = partial(make, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        self._acceptor = Acceptor(sockets or [], protocol, end_idle=self._end_an_idle_connection)
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def _end_an_idle_connection(self) -> bool:
        return end_one(self.server_state.connections, lambda each: each.has_rested(IDLE_S))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = ending_signals()
        for number in numbers:
            loop.add_signal_handler(number, self.end, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def end(self, number: signal.Signals) -> None:
        """What a signal does. Called on the event loop."""
        if not self._health.draining:
            self._drain(number.name)
        elif number is signal.SIGINT and self.should_exit:
            self._end_requests()
        else:
            self._close()

    def end_by_order(self) -> None:
        """What an administrator's order to drain does: a second one nothing more."""
        if not self._health.draining:
            self._drain("order")

    def _drain(self, cause: str) -> None:
        logger.info("draining gateway", extra={"fields": {"cause": cause, "notice_s": self._notice_s}})
        self._health.drain()
        asyncio.get_running_loop().call_later(self._notice_s, self._close)

    def _close(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            asyncio.get_running_loop().call_later(self._drain_s, self._end_requests)

    def _end_requests(self) -> None:
        self._closing.end()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._force)

    def _force(self) -> None:
        self.force_exit = True


def http_server(app: FastAPI, config: GatewayConfig, health: Health, closing: Closing | None = None) -> GatewayServer:
    """The HTTP server of a gateway; run it with `serve(sockets=[...])`. `health`, `closing`: the application's."""
    return GatewayServer(
        _uvicorn_config(app, config),
        health,
        notice_s=config.drain_notice_s,
        drain_s=config.drain_timeout_s,
        closing=closing,
    )


def _uvicorn_config(app: ASGIApp, config: GatewayConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GatewayConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + 2 * LAST_WORDS_S),
    )


def front_server(config: GatewayConfig, front: Front) -> "AdminServer":
    """Of the administrators' port of several processes."""
    return AdminServer(_uvicorn_config(front, config))


class AdminServer(uvicorn.Server):
    """The server of the administrators' port. It handles no signals: it ends after the API's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _token_file(gateway: Gateway, host: str, port: int) -> Iterator[None]:
    """The token for commands to the port is in a file for as long as the block lasts."""
    if gateway.place is not None and gateway.place.number:
        # The first of the processes writes it for all.
        yield
        return
    file = TokenFile(token=gateway.order_access.token, address=Address(host, port))
    file.write()
    try:
        yield
    finally:
        file.remove()


@asynccontextmanager
async def _admin_server(
    gateway: Gateway,
    server: GatewayServer,
    config: GatewayConfig,
    api_listener: socket.socket,
    listener: socket.socket | None,
    console: Console | None,
) -> AsyncIterator[None]:
    """Serves the administrators' port, if there is one, for as long as the block lasts."""
    if listener is None:
        # The routes of adapters are on the API's port.
        with _token_file(gateway, config.host, api_listener.getsockname()[1]):
            yield
        return
    app = create_admin_app(gateway, drain=server.end_by_order, console=console)
    admin = AdminServer(_uvicorn_config(app, config))
    serving = asyncio.create_task(admin.serve(sockets=[listener]), name="admin")
    if config.place is not None:
        config.place.new_socket.rename(config.place.socket)
    fields = {"host": config.admin_host, "port": config.admin_port}
    logger.info("serving administrators' routes", extra={"fields": fields})
    try:
        port = config.admin_port if config.admin_port is not None else listener.getsockname()[1]
        with _token_file(gateway, config.admin_host, port):
            yield
    finally:
        admin.should_exit = True
        await serving


async def _serve(
    config: GatewayConfig,
    tokenizers: Mapping[Path, TextTokenizer],
    keys: Mapping[str, KeyPair | None],
    listener: socket.socket,
    admin_listener: socket.socket | None,
    spans: "SpanExport | None",
) -> None:
    health = Health()
    await start_background_threads()
    body_parser()
    async with _open_fleets() as door:
        fleets, home = door.add(config.models, tokenizers, keys), door.add_home(config)
        # An invalid key file is reported at once, without waiting for Redis.
        gateway = build_gateway(
            config,
            [fleet.parts for fleet in fleets],
            clock=MonotonicClock(),
            health=health,
            usage=fleets[0].router.usage if home is None else home.usage,
            spans=spans,
            home=None if home is None else home.place,
        )
        door.loads = counted_loads(gateway.shared.families, gateway.clock)
        await _start(fleets if home is None else [home])
        live = LiveModels(
            catalog=gateway.models,
            door=door,
            build=gateway.build_service,
            opened=fleets,
            independent=config.opens_later,
        )
        console = None
        if config.serves_console:
            console = console_of(gateway, lambda: [fleet.view for fleet in live.fleets])
        app = api_app(gateway, metrics=admin_listener is None, console=console if admin_listener is None else None)
        server = http_server(app, config, health, gateway.answering.closing)
        _warn_open_access(config)
        logger.info("gateway listening", extra={"fields": {"host": config.host, "port": config.port}})
        # What is there now stays. Else every full collection walks all of it, and all streams wait.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(min(TURN_S, sys.getswitchinterval()))
        async with (
            _following(config, gateway, live),
            _admin_server(gateway, server, config, listener, admin_listener, console),
        ):
            await server.serve(sockets=[listener])


def _warn_open_access(config: GatewayConfig) -> None:
    """Without keys: log which clients can use this gateway, as a warning if other machines can."""
    if config.api_keys is not None:
        return
    if is_loopback(config.host):
        logger.info("authentication is disabled: --api-keys is not set; all users of this machine can use this gateway")
    else:
        where = "any address of this machine" if is_wildcard(config.host) else config.host
        logger.warning(
            "authentication is disabled: --api-keys is not set; any client of port %d on %s can use this gateway as "
            "any tenant; set --api-keys FILE (docs/limits.md) or --host 127.0.0.1",
            config.port,
            where,
        )
    if config.admin_port is not None and not is_loopback(config.admin_host):
        logger.warning(
            "authentication is disabled: --api-keys is not set; any client of --admin-port %d can read metrics, the "
            "console and data of requests; set --api-keys FILE or restrict the port",
            config.admin_port,
        )


@asynccontextmanager
async def _open_fleets() -> AsyncIterator[OpenFleets]:
    """Those that are still open at the end of the block are closed."""
    fleets = OpenFleets()
    try:
        yield fleets
    finally:
        await fleets.close_all()


@asynccontextmanager
async def _following(config: GatewayConfig, gateway: Gateway, live: LiveModels[RoutedFleet]) -> AsyncIterator[None]:
    """Changes of the models are carried out, if there may be any, for as long as the block lasts."""
    if config.models_file is None and config.fleet_model is None:
        yield
        return
    metrics = ModelsFileMetrics(gateway.shared.families, served=len(config.models))
    if config.fleet_model is not None:
        work = _opened_later(OneEntry(config.fleet_model), gateway, live, metrics)
    elif config.models_file is not None and config.independent_models:
        work = _opened_later(FileEntries(config.models_file), gateway, live, metrics)
    elif config.models_file is not None:
        work = ModelsWatch(source=config.models_file, live=live, metrics=metrics).run(config.models)
    following = asyncio.create_task(work, name="models file")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await live.close()


def _opened_later(
    entries: Entries, gateway: Gateway, live: LiveModels[RoutedFleet], metrics: ModelsFileMetrics
) -> Coroutine[Any, Any, None]:
    families = gateway.shared.families
    models = IndependentModels(entries=entries, live=live, metrics=metrics, clock=gateway.clock, families=families)
    gateway.health.add_check("models", models.missing)
    return models.run()


async def _start(fleets: Sequence[RoutedFleet] | Sequence[HomeFleet]) -> None:
    """Raises `StartupError` when a Redis cannot be used at all."""
    try:
        for fleet in fleets:
            await fleet.start()
    except RedisUnavailableError as error:
        raise StartupError(str(error)) from error
