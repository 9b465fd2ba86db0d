"""Requests of an adapter whose name is announced, and stands for nothing yet: no worker has read it.

Each waits here, before it enters the queue, until the name is registered. The autoscaler sees it as one that no worker
can take, so a service at zero gets a worker, on which the operator loads the adapter. Its prompt cannot be queued
earlier: blocks of its cache, and which workers can serve it, depend on the adapter's content.

Places are shared as those of the queue are (`FairQueue`): where all are taken, a new request displaces the last one of
the tenant that has the most for its weight, and a tenant that has them all displaces no request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import quoted
from tandem_engine.messages.requests import AdapterRef
from tandem_services.common.errors import ApiError, not_found, unavailable
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.models.adapters import ref_of
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.queueing.fair_queue import FairQueue, Waiting
from tandem_services.router.usage_counters import VirtualCounters

POLL_S = 0.1
MAX_POLL_RATE = 200
"""A second, of all requests that wait: each may look at a large fleet."""
RETRY_AFTER_S = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiter(Waiting):
    """One request."""

    displaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Another one has its place."""

    async def pause(self, seconds: float) -> None:
        """Returns earlier where it is displaced."""
        try:
            async with asyncio.timeout(seconds):
                await self.displaced.wait()
        except TimeoutError:
            return


@dataclass(kw_only=True, slots=True)
class ExpectedAdapters:
    """Of one model service. Belongs to its event loop."""

    model: ServedModel
    clock: Clock
    changed: Callable[[int], object]
    """Receives how many requests wait, whenever that changes."""
    wait_s: float
    """The longest wait."""
    seats: int
    """The most requests that wait."""
    _waiting: FairQueue[_Waiter] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = FairQueue(seats=self.seats, counters=VirtualCounters())

    async def find(self, name: str, tenant: Tenant) -> AdapterRef:
        """What `name` stands for, once it stands for something.

        Raises `ApiError`: 404 where it is announced no longer; 503 where that takes too long, and where its place is
        needed by a tenant with fewer.
        """
        waiter = _Waiter(tenant=tenant.name, weight=tenant.weight, priority=0, arrived=self.clock.now())
        loser = self._waiting.add(waiter)
        if loser is waiter:
            raise _no_place()
        if loser is not None:
            loser.displaced.set()
        self.changed(len(self._waiting))
        try:
            return await self._wait(name, waiter)
        finally:
            self._waiting.remove(waiter)
            self.changed(len(self._waiting))

    async def _wait(self, name: str, waiter: _Waiter) -> AdapterRef:
        until = waiter.arrived + self.wait_s
        while (adapter := self.model.adapters.find(name)) is None:
            if waiter.displaced.is_set():
                raise _no_place()
            if name not in self.model.announced_adapters:
                raise not_found(f"The model '{quoted(name)}' does not exist.", "model", reason="model_not_found")
            if self.clock.now() >= until:
                message = f"No worker has loaded the adapter '{quoted(name)}' yet. Try again later."
                raise unavailable(message, retry_after=RETRY_AFTER_S)
            await waiter.pause(max(POLL_S, len(self._waiting) / MAX_POLL_RATE))
        return ref_of(adapter)


def _no_place() -> ApiError:
    return unavailable("Too many requests wait for adapters. Try again later.", retry_after=RETRY_AFTER_S)
