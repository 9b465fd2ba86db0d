"""Which workers may be offered to the router: those through which a canary has gone themselves. Pure, as `canaries`.

A revision is tried by its first pair. Every other worker of it that stands by (added, replaced, restarted) is tried by
a canary of its own, with a partner of the other role that serves already where there is one:

    stands by ─▶ canary ─┬─ passed ─▶ proved, until it was offered
                         └─ failed ─▶ again after `RETRY_S`, with the next partner: the fault may be that one's

Where canaries through the gateway fail as well, the fault is not the newcomer's: after `BAD_IN_A_ROW` it counts as
proved, for it is no worse than those that serve. Who finds no partner is not tried, and helps itself
(`tandem_services.worker.standby`).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.pods import PodSeen

RETRY_S = 5.0
BAD_IN_A_ROW = 3
AT_ONCE = 8
"""Newcomers that are asked in one turn: they share a gateway, and partners that serve clients."""


@dataclass(frozen=True, slots=True)
class _Tried:
    asked_at: float = -math.inf
    bad: int = 0
    message: str = ""


@dataclass(slots=True)
class PodTrials:
    """Of one service. Times are monotonic seconds; pods go by their uid."""

    _tried: dict[str, _Tried] = field(default_factory=dict)
    _proved: set[str] = field(default_factory=set)

    def due(self, now: float, usable: Iterable[PodSeen], passed: Collection[str]) -> list[tuple[PodSeen, PodSeen]]:
        """Newcomers of the revisions `passed` to ask now, each with its partner; those that waited longest first."""
        known = sorted(usable, key=lambda pod: pod.name)
        newcomers = [pod for pod in known if pod.standby and pod.worker_role and pod.revision in passed]
        due = [pod for pod in newcomers if pod.uid not in self._proved and now - self._of(pod).asked_at >= RETRY_S]
        due.sort(key=lambda pod: self._of(pod).asked_at)
        partners = ((pod, self._partner(pod, known)) for pod in due)
        return [(pod, partner) for pod, partner in partners if partner is not None][:AT_ONCE]

    def take(self, now: float, pod: PodSeen, answer: Canary, *, serving: bool) -> None:
        """What became of it. `serving`: canaries through the gateway pass."""
        if answer.passed:
            self.prove(pod)
            return
        bad = self._of(pod).bad + 1
        self._tried[pod.uid] = _Tried(now, bad, answer.message)
        if bad >= BAD_IN_A_ROW and not serving:
            self.prove(pod)

    def prove(self, *pods: PodSeen) -> None:
        """A canary has gone through them."""
        self._proved |= {pod.uid for pod in pods if pod.standby}

    def proved(self, pod: PodSeen) -> bool:
        return pod.uid in self._proved

    def offered(self, pod: PodSeen) -> None:
        """It stands by no longer. Should it do so again, it is another process, and tried again."""
        self._proved.discard(pod.uid)
        self._tried.pop(pod.uid, None)

    def failing(self, pods: Iterable[PodSeen]) -> Mapping[str, str]:
        """Names of those that are kept away, with the reason. Forgets who is no longer there."""
        living = {pod.uid: pod for pod in pods}
        self._tried = {uid: tried for uid, tried in self._tried.items() if uid in living}
        self._proved &= living.keys()
        return {
            living[uid].name: tried.message
            for uid, tried in self._tried.items()
            if tried.bad >= BAD_IN_A_ROW and uid not in self._proved and not living[uid].ready
        }

    def _partner(self, pod: PodSeen, usable: Sequence[PodSeen]) -> PodSeen | None:
        """The next one at each failure, of those that serve, else of those that stand by too."""
        others = [one for one in usable if one.worker_role not in (None, pod.role) and one.revision == pod.revision]
        chosen = [one for one in others if not one.standby] or others
        return chosen[self._of(pod).bad % len(chosen)] if chosen else None

    def _of(self, pod: PodSeen) -> _Tried:
        return self._tried.get(pod.uid, _Tried())
