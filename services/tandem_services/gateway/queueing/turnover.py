"""Places that requests have left and that no worker has reported yet. Pure.

What workers report is up to a second old. A place that a request of this gateway has left, or that another gateway has
left to it, is free at once, whatever the last report says: so many requests may go to workers that say they are full.
A place that nobody has taken for `UNREPORTED_S` is in a report by then, or has been taken by another gateway, and
counts no more: counted for longer, it would be filled twice.
"""

from collections import deque
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.router.keys import RESERVATION_MS

UNREPORTED_S = RESERVATION_MS / 1000
"""That a request has gone takes as long to be in a report as that one has come."""


@dataclass(kw_only=True, slots=True)
class Turnover:
    """One per queue; belongs to its event loop."""

    clock: Clock
    _since: deque[float] = field(default_factory=deque)
    """Of each place, oldest first."""

    def __len__(self) -> int:
        """Places that may be taken now."""
        oldest = self.clock.now() - UNREPORTED_S
        while self._since and self._since[0] < oldest:
            self._since.popleft()
        return len(self._since)

    def add(self, places: int) -> None:
        """So many are free from now on; none if less than one."""
        self._since.extend([self.clock.now()] * places)

    def take(self) -> bool:
        """Take one. False when there is none."""
        if not len(self):
            return False
        self._since.popleft()
        return True

    def leave(self) -> int:
        """Take all of them. Returns how many."""
        places = len(self)
        self._since.clear()
        return places
