"""Simulated time: a clock that jumps from one event to the next.

Events at the same time happen in the order in which they were planned, so a run is a function of its inputs.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

Action = Callable[[], Awaitable[None] | None]


@dataclass(slots=True)
class EventQueue:
    """A `Clock` and the events that move it. Seconds from the start of the run."""

    _now: float = 0.0
    _planned: int = 0
    _events: list[tuple[float, int, Action]] = field(default_factory=list)

    def now(self) -> float:
        return self._now

    def at(self, time: float, action: Action) -> None:
        """Plan `action`; a time that has passed means at once."""
        self._planned += 1
        heappush(self._events, (max(time, self._now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self._now + seconds, action)

    async def run(self) -> None:
        """Until no event is left."""
        while self._events:
            self._now, _, action = heappop(self._events)
            waiting = action()
            if waiting is not None:
                await waiting
