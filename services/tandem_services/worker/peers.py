"""Which other incarnations are gone, from the member lists of the registry.

A list names every incarnation that is not fenced, so one that is missing from the next list is fenced for
good: its lease ran out long ago, a newer one took its name, or it left. A wiped registry (new epoch) proves
nothing: its old members get one fencing period to come back before they count as gone.

A member may come and go between two lists. Nobody notices, except an engine that holds pages for it: whom an
engine waits for in vain, and no list names for a fencing period, is gone as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.router.keys import FENCE_AFTER_MS, worker_id_of


@dataclass(kw_only=True, slots=True)
class PeerWatch:
    """Remembers the last list. Not thread-safe."""

    clock: Clock
    own: str
    _epoch: str = ""
    _known: frozenset[str] = frozenset()
    _missing: dict[str, float] = field(default_factory=dict)
    """Members from before a wipe that have not come back, and suspects; and when they count as gone."""

    def update(self, epoch: str, members: frozenset[str] | None) -> frozenset[str]:
        """Incarnations that are gone since the last call. `members` is None when nothing has changed."""
        members = self._known if members is None else members - {self.own}
        lost = self._known - members
        if self._epoch and epoch != self._epoch:
            deadline = self.clock.now() + FENCE_AFTER_MS / 1000
            self._missing |= dict.fromkeys(lost, deadline)
            lost = frozenset()
        self._epoch, self._known = epoch, members
        return lost | self._give_up(members)

    def suspect(self, silent: Iterable[str]) -> None:
        """The engine waits in vain for these incarnations. `update` tells which of them are gone."""
        for incarnation in silent:
            if incarnation not in self._known:
                self._missing.setdefault(incarnation, self.clock.now() + FENCE_AFTER_MS / 1000)

    def _give_up(self, members: frozenset[str]) -> frozenset[str]:
        """Missing ones whose time is over or whose name has a new incarnation."""
        names = {worker_id_of(member) for member in members}
        now = self.clock.now()
        gone = {
            incarnation
            for incarnation, deadline in self._missing.items()
            if incarnation not in members and (now >= deadline or worker_id_of(incarnation) in names)
        }
        self._missing = {
            incarnation: deadline
            for incarnation, deadline in self._missing.items()
            if incarnation not in members and incarnation not in gone
        }
        return frozenset(gone)
