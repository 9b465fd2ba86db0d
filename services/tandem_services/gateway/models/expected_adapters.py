"""Requests of an adapter whose name is announced, and stands for nothing yet: no worker has read it.

Each waits here, before it enters the queue, until the name is registered. The autoscaler sees it as one that no worker
can take, so a service at zero gets a worker, on which the operator loads the adapter. Its prompt cannot be queued
earlier: blocks of its cache, and which workers can serve it, depend on the adapter's content.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import quoted
from tandem_engine.messages.requests import AdapterRef
from tandem_services.common.errors import not_found, unavailable
from tandem_services.gateway.models.adapters import ref_of
from tandem_services.gateway.models.model import ServedModel

POLL_S = 0.1
MAX_POLL_RATE = 200
"""A second, of all requests that wait: each may look at a large fleet."""
RETRY_AFTER_S = 5.0


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
    _waiting: int = 0

    async def find(self, name: str) -> AdapterRef:
        """What `name` stands for, once it stands for something.

        Raises `ApiError`: 404 where it is announced no longer, 503 where that takes too long or too many wait.
        """
        if self._waiting >= self.seats:
            raise unavailable("Too many requests wait for adapters. Try again later.", retry_after=RETRY_AFTER_S)
        self._note(self._waiting + 1)
        try:
            return await self._wait(name)
        finally:
            self._note(self._waiting - 1)

    async def _wait(self, name: str) -> AdapterRef:
        until = self.clock.now() + self.wait_s
        while (adapter := self.model.adapters.find(name)) is None:
            if name not in self.model.announced_adapters:
                raise not_found(f"The model '{quoted(name)}' does not exist.", "model", reason="model_not_found")
            if self.clock.now() >= until:
                message = f"No worker has loaded the adapter '{quoted(name)}' yet. Try again later."
                raise unavailable(message, retry_after=RETRY_AFTER_S)
            await asyncio.sleep(max(POLL_S, self._waiting / MAX_POLL_RATE))
        return ref_of(adapter)

    def _note(self, waiting: int) -> None:
        self._waiting = waiting
        self.changed(waiting)
