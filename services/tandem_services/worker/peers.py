"""Which other incarnations are gone, from the claims that the registry has.

    superseded  a newer incarnation of the same worker has signed its claim: the older one is gone, at once
    missing     it is registered no longer, and nothing says why: it has left, it has died, it does not reach Redis, or
                Redis has lost it. It is asked itself (`peer_checks`), and is gone when it does not answer

A wiped registry (new epoch) proves even less: its old members get one fencing period to come back before they are
asked. So do incarnations that the engine waits for and no list names.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.router.deployment import supersedes
from tandem_services.router.keys import FENCE_AFTER_MS, worker_id_of

ASK_AGAIN_S = 5.0
"""A peer that answers and is not registered is asked again after this long."""


@dataclass(kw_only=True, slots=True)
class PeerWatch:
    """Remembers the last list. Not thread-safe."""

    clock: Clock
    own: str
    _epoch: str = ""
    _known: frozenset[str] = frozenset()
    _missing: dict[str, float] = field(default_factory=dict)
    """Incarnations that no list names any more, and suspects; and when they are to be asked."""

    def update(self, epoch: str, members: frozenset[str] | None) -> frozenset[str]:
        """Incarnations that a newer one has superseded. `members` is None when nothing has changed."""
        members = self._known if members is None else members - {self.own}
        wiped = bool(self._epoch) and epoch != self._epoch
        self._expect(self._known - members, within_s=FENCE_AFTER_MS / 1000 if wiped else 0.0)
        self._epoch, self._known = epoch, members
        self._missing = {missing: at for missing, at in self._missing.items() if missing not in members}
        newest = {worker_id_of(member): member for member in members}
        superseded = {
            missing for missing in self._missing if supersedes(newest.get(worker_id_of(missing), ""), missing)
        }
        for incarnation in superseded:
            self.forget(incarnation)
        return frozenset(superseded)

    def suspect(self, silent: Iterable[str]) -> None:
        """The engine waits in vain for these incarnations."""
        self._expect((each for each in silent if each not in self._known), within_s=FENCE_AFTER_MS / 1000)

    def due(self) -> frozenset[str]:
        """Missing ones that are to be asked now."""
        now = self.clock.now()
        return frozenset(missing for missing, at in self._missing.items() if now >= at)

    def answered(self, incarnation: str) -> None:
        """It lives, whatever the registry says."""
        if incarnation in self._missing:
            self._missing[incarnation] = self.clock.now() + ASK_AGAIN_S

    def forget(self, incarnation: str) -> None:
        """It is gone."""
        self._missing.pop(incarnation, None)

    def _expect(self, incarnations: Iterable[str], *, within_s: float) -> None:
        for incarnation in incarnations:
            self._missing.setdefault(incarnation, self.clock.now() + within_s)
