"""Places that become free at workers: those that no report contains yet, and how fast requests get one."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_services.router.keys import RESERVATION_MS

MAX_RETRY_S = 30.0

PACE_SAMPLES = 32
"""Admissions from the queue that its pace is measured by."""


@dataclass(kw_only=True, slots=True)
class Pace:
    """How fast a queue admits."""

    clock: Clock
    _admitted_at: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_SAMPLES))

    def restart(self) -> None:
        """A request came to an empty queue. The time before it was no wait."""
        self._admitted_at.clear()

    def admitted(self) -> None:
        """A queued request got workers."""
        self._admitted_at.append(self.clock.now())

    def wait_s(self, waiting: int) -> float:
        """Time until so many have been admitted, at the current rate: 1 to `MAX_RETRY_S`."""
        if len(self._admitted_at) < 2:
            return 1.0
        return min(max(self.delay_s(waiting), 1.0), MAX_RETRY_S)

    def delay_s(self, waiting: int) -> float:
        """The same without bounds; 0 where the rate is not known."""
        if len(self._admitted_at) < 2:
            return 0.0
        elapsed = max(self.clock.now() - self._admitted_at[0], 1e-3)
        return waiting * elapsed / len(self._admitted_at)


UNREPORTED_S = RESERVATION_MS / 1000
"""That a request has gone takes as long to be in a report as that one has come."""


class _Place(NamedTuple):
    since: float
    worker: str
    cell: str


@dataclass(kw_only=True, slots=True)
class Turnover:
    """One per queue; belongs to its event loop."""

    clock: Clock
    _places: deque[_Place] = field(default_factory=deque)
    """Oldest first."""

    def __len__(self) -> int:
        """Places that may be taken now."""
        oldest = self.clock.now() - UNREPORTED_S
        while self._places and self._places[0].since < oldest:
            self._places.popleft()
        return len(self._places)

    def add(self, places: int, *, worker: str = "", cell: str = "") -> None:
        """So many are free from now on; none if less than one. `worker`: the incarnation where; "" if not known.
        `cell`: the other cell that it is in; "": the gateway's own one."""
        self._places.extend([_Place(self.clock.now(), worker, cell)] * places)

    def take(self, serves: Callable[[str], bool] | None = None, *, cell: str = "") -> bool:
        """Take the oldest place in `cell`, of a worker, by incarnation, that `serves`; of any without. False when there
        is none."""
        if not len(self):
            return False
        able = (each for each in self._places if each.cell == cell and (serves is None or serves(each.worker)))
        place = next(able, None)
        if place is None:
            return False
        self._places.remove(place)
        return True

    def leave(self) -> int:
        """Drop all of them. Returns how many were in the own cell, where other gateways may take them."""
        places = sum(not place.cell for place in self._places) if len(self) else 0
        self._places.clear()
        return places
