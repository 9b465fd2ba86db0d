"""Why nobody starves under a policy that lets later requests go first.

A request that has waited for `seconds` is *overdue*. Overdue requests go before all others, in the order of the
queue, so from then on only those that were before it can be. The priority policy counts in `levels` instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.clock import Clock
from tandem_engine.scheduler.request import Request


class Aged(NamedTuple):
    """A queue in two parts, each in the order of the queue."""

    overdue: list[Request]
    others: list[Request]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ageing:
    """What waiting is worth."""

    clock: Clock
    seconds: float

    def split(self, waiting: Iterable[Request]) -> Aged:
        due = self.clock.now() - self.seconds
        aged = Aged([], [])
        for req in waiting:
            (aged.overdue if req.arrived_at <= due else aged.others).append(req)
        return aged

    def levels(self, req: Request) -> int:
        """How many times `seconds` have passed since `req` arrived."""
        return int((self.clock.now() - req.arrived_at) / self.seconds)
