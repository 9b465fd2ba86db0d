"""Which workers the price may choose among. One policy for each role, in a small file each.

The router asks the policy of the decode role first, then that of the prefill role among workers that can hand to
those. What a policy passes over is left out of the query, as workers are that the request has failed on; everything
else, the price of pair and alone, the reservation and explain, stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem_services.router.choice import RouteQuery


@dataclass(frozen=True, slots=True)
class Contender:
    """A live worker that may take the request."""

    incarnation: str
    outstanding: float
    """What this gateway has sent to it and not got back: seconds of prompts on a prefill worker, else sequences."""


class Policy(Protocol):
    """One for each role of each router; it may keep state."""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        """Those of `contenders` (at least one, in the order of their names) that stay; at least one."""
        ...
