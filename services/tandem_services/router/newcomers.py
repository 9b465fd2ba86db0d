"""Workers that have just registered, and how much of their share they are offered yet.

A newcomer has an empty queue, so that it is the cheapest for every gateway at once; it has kernels still to compile and
connections still to make, so that it is slower than its price says. Its share grows from nothing to all of it within
`RAMP_S`. While a fleet starts, and to a gateway that has just started itself, everybody is new and so nobody is.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from tandem_engine.clock import Clock

RAMP_S = 10.0
"""Ten heartbeats: what a newcomer really does is in its reports by then."""

START_S = 30.0
"""Workers of one fleet load their weights at different speed: whoever comes within this time belongs to its start."""

FORGET_S = 60.0


@dataclass(slots=True)
class Newcomers:
    """One router's."""

    clock: Clock
    _first: dict[str, float] = field(default_factory=dict)
    """Incarnation → when it was first seen, or early enough for who belongs to the start."""
    _last: dict[str, float] = field(default_factory=dict)
    _began: float | None = None
    """When the first worker was seen."""
    _young_until: float = -math.inf

    def observe(self, incarnations: Collection[str]) -> None:
        """The fleet as of now. Who is away for `FORGET_S` is forgotten, not at once: Redis may have lost it."""
        now = self.clock.now()
        if self._began is None and incarnations:
            self._began = now
        starting = self._began is None or now - self._began < START_S
        for incarnation in incarnations:
            self._last[incarnation] = now
            if incarnation not in self._first:
                self._first[incarnation] = first = now - RAMP_S if starting else now
                self._young_until = max(self._young_until, first + RAMP_S)
        for incarnation in [one for one, last in self._last.items() if now - last > FORGET_S]:
            del self._first[incarnation], self._last[incarnation]

    @property
    def any(self) -> bool:
        """Whether somebody has not all of its share yet."""
        return self.clock.now() < self._young_until

    def share(self, incarnation: str) -> float:
        """From 0 for one seen just now to 1, also for one that no view has shown."""
        first = self._first.get(incarnation)
        return 1.0 if first is None else min(1.0, (self.clock.now() - first) / RAMP_S)
