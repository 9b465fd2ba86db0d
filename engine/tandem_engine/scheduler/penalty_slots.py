"""Places of penalised requests in the device's tables of token counts.

A request has one from its first sampled token on a row until it gives that row back. The lowest free number is
given out, so the tables are as large as the most penalised requests that ran at once (`sampling.penalties`). No
fence is needed: whoever gets a slot next loads it in a later step, after all that steps in flight do to it.
"""

import heapq
from dataclasses import dataclass, field

from tandem_engine.scheduler.request import Request


@dataclass(kw_only=True, slots=True)
class PenaltySlots:
    """Scheduler thread only."""

    used: int = 0
    """Numbers given out so far: the size that the tables must have."""
    free: list[int] = field(default_factory=list)

    def of(self, req: Request) -> int:
        """The slot of `req`, given out now if it has none."""
        if req.penalty_slot is None:
            req.penalty_slot = heapq.heappop(self.free) if self.free else self._another()
        return req.penalty_slot

    def give_back(self, req: Request) -> None:
        """No-op for a request without a slot."""
        if req.penalty_slot is not None:
            heapq.heappush(self.free, req.penalty_slot)
            req.penalty_slot = None

    def _another(self) -> int:
        self.used += 1
        return self.used - 1
