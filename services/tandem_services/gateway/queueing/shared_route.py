"""Places the choices of one prompt: each is admitted and released separately, but on the same workers where it fits.

Each choice takes a seat of the fair queue, is charged, and holds its own reservation, so that no worker gets more
sequences than its capacity. The choices query the router in sequence: first for the workers of the previous choice,
which compute the prompt, then for any worker if those lack capacity.

Only first attempts use this route. A choice that has failed queries the router separately.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem_services.router.decision import NoWorkersError, RouteDecision, RouteQuery
from tandem_services.router.scoring import has_to_wait


class Chooser(Protocol):
    """What choices of one prompt need of the router; see `Router`."""

    async def release(self, decision: RouteDecision) -> None: ...


@dataclass(kw_only=True, slots=True)
class SharedRoute:
    """Of one prompt with several choices."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the choice that queries the router."""
    workers: frozenset[str] = frozenset()
    """Incarnations of the last choice's workers; none before the first query."""

    async def choose(
        self,
        chooser: Chooser,
        query: RouteQuery,
        ask: Callable[[RouteQuery], Awaitable[RouteDecision]],
        alone: Callable[[], Awaitable[RouteDecision]],
    ) -> RouteDecision:
        """Where the other choices of the prompt are, by `ask`, as long as there is room; else by `alone`.

        Raises what `alone` raises.
        """
        async with self.asking:
            decision = await self._among(chooser, query, ask) if self.workers else None
            if decision is None:
                decision = await alone()
            both = (decision.decode, decision.prefill)
            self.workers = frozenset(worker.incarnation for worker in both if worker is not None)
            return decision

    async def _among(
        self, chooser: Chooser, query: RouteQuery, ask: Callable[[RouteQuery], Awaitable[RouteDecision]]
    ) -> RouteDecision | None:
        """None where the workers of the others have no room."""
        try:
            decision = await ask(replace(query, only=self.workers))
        except NoWorkersError:
            return None
        if has_to_wait(decision.terms):
            await chooser.release(decision)
            return None
        return decision
