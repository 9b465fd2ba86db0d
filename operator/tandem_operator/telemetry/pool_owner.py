"""Replicas of WorkerPools that another client changes while the autoscaler owns them (mode internal). Pure.

    another number than ordered   restored once, with an event
    and again                     left as it is, and nothing is scaled (hold), until it has been the same for `QUIET_S`,
                                  or is again what was ordered

Two that write in turns would replace pods without end. One of them must give in, whichever is faster: the autoscaler,
because a person who has changed the number twice means it.

An order may not be in the operator's view of the cluster yet: for `SEEN_S` the number before it is not foreign.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.planning.status import CHANGED_BY_OTHERS

Counts = dict[RoleName, int]

SEEN_S = 30.0
QUIET_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """On the replicas of both pools."""

    restore: Counts = field(default_factory=dict)
    """Replicas to write again, of pools that were changed."""
    holding: str = ""
    """Why nothing may be scaled; empty if it may."""
    reason: str = ""
    """Of `restore`."""


@dataclass(kw_only=True, slots=True)
class PoolOwner:
    """One per autoscaler. A restart forgets: replicas are then what they are."""

    _ordered: Counts = field(default_factory=dict)
    _before: Counts = field(default_factory=dict)
    """What each pool had when it was ordered."""
    _ordered_at: float = 0.0
    _restored_at: float | None = None
    _foreign: Counts = field(default_factory=dict)
    _foreign_since: float = 0.0

    def ordered(self, at: float, pools: Mapping[RoleName, int], before: Mapping[RoleName, int]) -> None:
        """`pools` have been written, or are as they should be."""
        if dict(pools) != self._ordered:
            self._before, self._ordered_at = dict(before), at
        self._ordered = dict(pools)

    def forget(self, roles: Collection[RoleName] = ROLES) -> None:
        """The pools of `roles` are unknown, or belong to another controller: then they stay as they are."""
        self._ordered = {role: count for role, count in self._ordered.items() if role not in roles}
        self._foreign = {role: count for role, count in self._foreign.items() if role not in roles}
        if not self._ordered:
            self._restored_at = None

    def judge(self, at: float, pools: Mapping[RoleName, int], bounds: Mapping[RoleName, tuple[int, int]]) -> Verdict:
        """`bounds`: least and most replicas of each pool; a number that follows from new bounds is the operator's."""
        foreign = {role: pools[role] for role in ROLES if self._is_foreign(role, at, pools[role], bounds[role])}
        if not foreign:
            self._foreign = {}
            return Verdict()
        names = ", ".join(f"{role} from {self._ordered[role]} to {count}" for role, count in foreign.items())
        if not self._foreign and (self._restored_at is None or at - self._restored_at > QUIET_S):
            self._restored_at = at
            return Verdict(
                restore={role: _within(self._ordered[role], bounds[role]) for role in foreign},
                reason=f"replicas were changed by someone else ({names}), and spec.autoscaling.mode is internal",
            )
        if foreign != self._foreign:
            self._foreign, self._foreign_since = foreign, at
        if at - self._foreign_since > QUIET_S:
            self.forget()
            return Verdict()
        return Verdict(
            holding=f"{CHANGED_BY_OTHERS} ({names}); set spec.autoscaling.mode to external or none, "
            f"or stop changing WorkerPools"
        )

    def _is_foreign(self, role: RoleName, at: float, count: int, bounds: tuple[int, int]) -> bool:
        ordered = self._ordered.get(role)
        if ordered is None or count in (ordered, _within(ordered, bounds)):
            return False
        return not (count == self._before.get(role) and at - self._ordered_at < SEEN_S)


def _within(count: int, bounds: tuple[int, int]) -> int:
    return min(max(count, bounds[0]), bounds[1])
