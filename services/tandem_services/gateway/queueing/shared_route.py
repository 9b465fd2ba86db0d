"""Where the choices of one prompt go: each is admitted, placed and released by itself, beside the others where it fits.

Each choice takes a seat of the fair queue, is charged, and holds a reservation of its own, so that a worker never gets
more sequences than it has room for. One choice after the other asks the router: first for the workers of the choice
before it, which compute the prompt, and for any worker where those have no room.

Only first attempts go by it. A choice that has failed asks the router on its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem_services.router.decision import Choice, NoWorkersError, RouteQuery, WorkerView
from tandem_services.router.scoring import has_to_wait


class Chooser(Protocol):
    """What choices of one prompt need of the router; see `Router`."""

    async def release(self, choice: Choice) -> None: ...

    def workers(self) -> tuple[WorkerView, ...]: ...


@dataclass(kw_only=True, slots=True)
class SharedRoute:
    """Of one prompt with several choices."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the choice that asks the router."""
    workers: frozenset[str] = frozenset()
    """Incarnations of the last choice's workers; none before the first has asked."""

    async def choose(
        self,
        chooser: Chooser,
        query: RouteQuery,
        ask: Callable[[RouteQuery], Awaitable[Choice]],
        alone: Callable[[], Awaitable[Choice]],
    ) -> Choice:
        """Where the other choices of the prompt are, by `ask`, as long as there is room; else by `alone`.

        Raises what `alone` raises.
        """
        async with self.asking:
            choice = await self._among(chooser, query, ask) if self.workers else None
            if choice is None:
                choice = await alone()
            both = (choice.decode, choice.prefill)
            self.workers = frozenset(worker.incarnation for worker in both if worker is not None)
            return choice

    async def _among(
        self, chooser: Chooser, query: RouteQuery, ask: Callable[[RouteQuery], Awaitable[Choice]]
    ) -> Choice | None:
        """None where the workers of the others have no room."""
        others = frozenset(worker.incarnation for worker in chooser.workers()) - self.workers
        try:
            choice = await ask(replace(query, exclude=query.exclude | others))
        except NoWorkersError:
            return None
        if has_to_wait(choice.terms):
            await chooser.release(choice)
            return None
        return choice
