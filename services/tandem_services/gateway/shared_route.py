"""Where the choices of one prompt go: each is admitted, placed and released by itself, beside the others where it fits.

Each choice takes a seat of the fair queue, is charged, and holds a reservation of its own, so that a worker never gets
more sequences than it has room for. One choice after the other asks the router: first for the workers of the choice
before it, which compute the prompt, and for any worker where those have no room.

Only first attempts go by it. A choice that has failed asks the router on its own.
"""

import asyncio
from dataclasses import dataclass, field

from tandem_services.router.choice import Choice


@dataclass(kw_only=True, slots=True)
class SharedRoute:
    """Of one prompt with several choices."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the choice that asks the router."""
    workers: frozenset[str] = frozenset()
    """Incarnations of the last choice's workers; none before the first has asked."""

    def note(self, choice: Choice) -> None:
        both = (choice.decode, choice.prefill)
        self.workers = frozenset(worker.incarnation for worker in both if worker is not None)
