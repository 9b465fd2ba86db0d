"""Where the choices of one answer go: to the same workers, so that the prompt is computed and kept once.

Life of a route
    1. the first choice that is sent asks the router, for all of them; the others wait for the answer
    2. each choice that ends, or fails over to other workers, lets go
    3. the last one to let go gives the reservation back

Only first attempts go by it. A choice that has failed asks the router on its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from tandem_services.router.choice import Choice, RouteQuery

Ask = Callable[[RouteQuery], Awaitable[Choice]]
"""Asks the router, and reserves what it names."""


@dataclass(kw_only=True, slots=True)
class SharedRoute:
    """One decision of the router for `choices` choices of one prompt."""

    choices: int
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _choice: Choice | None = None
    _holders: int = 0

    async def choose(self, query: RouteQuery, ask: Ask) -> Choice:
        """What `ask` answers, with room for the output of all choices."""
        async with self._asking:
            if self._choice is None:
                self._choice = await ask(replace(query, max_tokens=query.max_tokens * self.choices))
        self._holders += 1
        return self._choice

    def let_go(self, choice: Choice) -> bool:
        """One choice has no more use for `choice`. True when nobody else has either: then it is to be released."""
        if choice is not self._choice:
            return True
        self._holders -= 1
        if self._holders:
            return False
        self._choice = None
        return True
