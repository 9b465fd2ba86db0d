"""New requests at a gateway: each waits, in real time, until `LateBinding` has workers for it or refuses it.

As long as somebody waits, one task takes turns: at once after each admission, else when a request has ended or a moment
has passed.
"""

import asyncio
from dataclasses import dataclass, field

from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.visitor import Ask, Visitor
from tandem_services.router.choice import Choice


@dataclass(kw_only=True, slots=True)
class Admission:
    """One per model service; belongs to its event loop."""

    binding: LateBinding
    """What is charged is told to it; that something has ended is told here, for somebody may wait for it."""
    _pump: "asyncio.Task[None] | None" = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, ask: Ask, *, tenant: Tenant, priority: int, prompt_tokens: int) -> Choice:
        """Workers with room for a new request, reserved for it; may take a while.

        Raises:
            ApiError: 429 when its tenant's other requests fill the queue; 503 when it is full, or nobody takes it in
                time.
        """
        choice: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        visitor = self.binding.visitor(ask, choice, tenant=tenant, priority=priority, prompt_tokens=prompt_tokens)
        found = await self.binding.arrive(visitor)
        return await self._wait(visitor, choice) if found is None else found

    def freed(self) -> None:
        """A request has ended, or left its worker."""
        if self.binding.queue:
            self.binding.freed()
            self._changed.set()

    async def close(self) -> None:
        """At shutdown: nobody waits any more."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        await self.binding.settle()

    async def _wait(self, visitor: Visitor, choice: "asyncio.Future[Choice]") -> Choice:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="admission")
        try:
            return await choice
        except asyncio.CancelledError:
            # It may have been admitted in the very moment in which its client left.
            if not choice.cancelled() and choice.exception() is None:
                self.binding.give_back(choice.result())
            raise
        finally:
            self.binding.leave(visitor)

    async def _run(self) -> None:
        """As long as somebody waits."""
        while self.binding.queue:
            if not await self.binding.turn():
                await self._pause()

    async def _pause(self) -> None:
        """Until something has changed, or a moment has passed."""
        try:
            async with asyncio.timeout(self.binding.policy.poll_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
