"""A whole worker service in the event loop of a test, with a mock engine process."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from tandem_engine.base.addresses import Address
from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.common.tokens import token_of
from tandem_services.router.registry import WorkerRecord
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.service import WorkerService
from tandem_testing.mock_engine_process import EngineRemote
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import MODEL, Fleet

PATIENCE_S = 60.0
T = TypeVar("T")


def config_for(server: RedisServer, remote: EngineRemote, *flags: str, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "model_path": "/nowhere",
        "model_name": MODEL,
        "role": Role.DECODE,
        "worker_id": "w1",
        "redis": RedisAddress(url=server.url),
        "engine_command": (sys.executable, "-m", "tandem_testing.mock_engine_process"),
        "engine_flags": ("--remote", str(remote.path), *flags),
        "redis_start_timeout_s": PATIENCE_S,
        "drain_timeout_s": PATIENCE_S,
    }
    return WorkerConfig(**fields | changes)


def http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)


def order_headers(url: str) -> dict[str, str]:
    """Of an order to a worker of this machine, as `tandem ctl` makes them."""
    parts = urlsplit(url)
    return {"Authorization": f"Bearer {token_of(Address(str(parts.hostname), parts.port or 0))}"}


class Running:
    """A service that runs as a task, with its engine's remote control."""

    def __init__(self, service: WorkerService, remote: EngineRemote) -> None:
        self.service = service
        self.remote = remote
        self.exit = asyncio.create_task(service.run())

    @property
    def url(self) -> str:
        return self.service.health_endpoint

    async def get(self, path: str) -> httpx.Response:
        async with http_client() as client:
            return await client.get(self.url + path, headers=order_headers(self.url))

    async def ready(self) -> bool:
        """Whether it knows itself registered: a little later than the registry does."""
        try:
            return (await self.get("/ready")).status_code == 200
        except httpx.TransportError:  # the health port opens while the service starts
            return False


@contextlib.asynccontextmanager
async def running(config: WorkerConfig, remote: EngineRemote, folder: Path) -> AsyncIterator[Running]:
    context = IpcContext()
    worker = Running(WorkerService(config, context, folder, MonotonicClock()), remote)
    try:
        await asyncio.to_thread(remote.accept)
        yield worker
    finally:
        worker.service.drain()
        worker.service.drain()
        await asyncio.gather(worker.exit, return_exceptions=True)
        context.close()


async def until(condition: Callable[[], Awaitable[T]], *, seconds: float = PATIENCE_S) -> T:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)
    return value


async def find(fleet: Fleet, worker_id: str = "w1") -> WorkerRecord | None:
    try:
        snapshot = await fleet.snapshot()
    except RedisUnavailableError:
        return None
    return next((record for record in snapshot.workers if record.view.worker_id == worker_id), None)
