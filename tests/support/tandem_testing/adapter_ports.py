"""Health ports of mock workers that load adapters: the worker's own routes, and a table without weights behind them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from starlette.applications import Starlette
from starlette.middleware import Middleware

from tandem_engine.base.errors import CheckpointError, EngineError
from tandem_engine.config import Role
from tandem_engine.messages.control import (
    LoadAdapter,
    OperatorOrder,
    OrderDone,
    OrderRefused,
    ServedAdapter,
    UnloadAdapter,
)
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.model.adapters.weights import AdapterWeights
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.tokens import OrderAccess
from tandem_services.worker.engine_process import OrderRefusedError
from tandem_services.worker.http_api import HealthServer, OrderGuard, operator_routes
from tandem_testing.gateway_builders import FakeChooser

TOKEN = "w" * 64
CONTENT = {"one": "1" * 32, "two": "2" * 32}
"""Digests of the folders that workers have."""


@dataclass(kw_only=True)
class AdapterPort:
    """Of one worker of `chooser`, whose view has what is loaded."""

    chooser: FakeChooser
    number: int
    """In the chooser's fleet."""
    contents: dict[str, str] = field(default_factory=lambda: dict(CONTENT))
    limit: int = 4
    orders: list[OperatorOrder] = field(default_factory=list)
    broken: int = 0
    """So many commands get no usable reply."""
    hung: bool = False
    """Its engine does not answer."""
    answers: asyncio.Event | None = None
    """Commands are carried out only once it is set."""
    on_order: Callable[[OperatorOrder], None] = lambda _: None
    """Called before a command is carried out."""
    table: AdapterTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = AdapterTable(limit=self.limit)

    @property
    def loaded(self) -> dict[str, str]:
        """Digests by name."""
        return {adapter.name: adapter.digest for adapter in self.table.served}

    async def operate(self, order: Callable[[int], OperatorOrder], *, timeout_s: float) -> OrderDone:
        command = order(1)
        self.orders.append(command)
        self.on_order(command)
        if self.answers is not None:
            await self.answers.wait()
        if self.broken:
            self.broken -= 1
            raise RuntimeError("planned")
        if self.hung:
            raise TimeoutError
        try:
            done = self.carry_out(command)
        except EngineError as error:
            raise OrderRefusedError(OrderRefused(nonce=1, code=error.code, message=str(error))) from error
        self.report()
        return done

    def report(self) -> None:
        """Let the view of the fleet have what is loaded."""
        view = self.chooser.fleet[self.number]
        self.chooser.fleet[self.number] = replace(view, adapters={each.name: each for each in self.table.served})

    async def set_role(self, role: Role, *, timeout_s: float) -> OrderDone:
        raise AssertionError(f"no command about adapters sets the role {role}")

    def carry_out(self, command: OperatorOrder) -> OrderDone:
        """Raises `EngineError`."""
        if isinstance(command, UnloadAdapter):
            gone = self.table.remove(command.name, digest=command.digest, cached=command.cached)
            return OrderDone(nonce=1, message="unloaded", figures={"digest": gone.digest})
        assert isinstance(command, LoadAdapter), command
        if command.path not in self.contents:
            raise CheckpointError(f"adapter {command.name!r}: {command.path}: no such folder")
        digest = self.contents[command.path]
        served = ServedAdapter(name=command.name, digest=digest, rank=4, root=command.path)
        weights = AdapterWeights(digest=bytes.fromhex(digest), rank=4, sites={})
        former = self.loaded.get(command.name, "")
        loaded = LoadedAdapters(weights=(weights,), served=(served,), folders={weights.digest: command.path})
        self.table.add(loaded, replaces=command.replaces, digest=command.digest)
        self.table.sweep([], launched=0, settled=0)
        return OrderDone(
            nonce=1,
            message="loaded",
            figures={"digest": digest, "rank": 4, "root": command.path, "size": 1000, "former": former},
        )


@asynccontextmanager
async def adapter_ports(chooser: FakeChooser) -> AsyncIterator[list[AdapterPort]]:
    """Ports of all workers of `chooser`, which listen until the block ends."""
    access = OrderAccess(token=TOKEN, hosts=AllowedHosts.of((), listening=("127.0.0.1",)))
    async with AsyncExitStack() as stack:
        ports = []
        for number, view in enumerate(chooser.fleet):
            port = AdapterPort(chooser=chooser, number=number)
            routes = operator_routes(port.operate, port.set_role, model=view.model)
            app = Starlette(routes=routes, middleware=[Middleware(OrderGuard, open_paths=(), access=access)])
            endpoint = await stack.enter_async_context(_listening(app))
            chooser.fleet[number] = replace(view, health_endpoint=endpoint)
            ports.append(port)
        yield ports


@asynccontextmanager
async def _listening(app: Starlette) -> AsyncIterator[str]:
    server = HealthServer(app, "127.0.0.1", 0, token=TOKEN)
    serving = asyncio.create_task(server.run_until_closed())
    # Its token file is there before the first request.
    await asyncio.sleep(0)
    try:
        yield server.endpoint
    finally:
        server.close()
        await serving
