"""How many workers each revision has while one replaces another. Pure; computes one step at a time.

    counts of each revision and role  +  desired counts  →  counts of the next step

1. The new revision gets one worker of each role. Nothing else changes until a canary has passed through that pair.
2. It then grows as `max_surge` allows, and old workers are removed as `max_unavailable` allows, unready ones first. New
   requests follow capacity: each revision gets its share.
3. A pair stays complete: the last old worker of a role is removed only when that of the other role can be, too.

Repeated steps converge: `tests/property/test_rollout.py` covers failing pods, scaling, reverts and new revisions during
a rollout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem_operator.api.model_service import Rollout
from tandem_operator.api.types import ROLES, RoleName

Counts = dict[RoleName, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RevisionSeen:
    """Workers of one revision as they are."""

    name: str
    desired: Mapping[RoleName, int]
    ready: Mapping[RoleName, int]
    canary_passed: bool = False
    """A request went through a pair of it and came back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Workers of each revision as they should be next."""

    desired: dict[str, Counts]


def next_step(target: str, wanted: Mapping[RoleName, int], revisions: Iterable[RevisionSeen], rollout: Rollout) -> Step:
    """`revisions`: all with existing or desired workers, oldest first; `target` may be among them."""
    seen = {revision.name: revision for revision in revisions}
    new = seen.pop(target, RevisionSeen(name=target, desired={}, ready={}))
    old = [revision for revision in seen.values() if any(revision.desired.values())]
    if not old:
        return Step(desired={target: {role: wanted[role] for role in ROLES}})
    if rollout.paused:
        return _paused(new, old, wanted)
    needed = {role: _needed(new, old, role, wanted[role], rollout) for role in ROLES}
    if new.canary_passed and rollout.max_surge > 0:
        _keep_pairs(needed, old, wanted)
    desired = {revision.name: dict(revision.desired) for revision in old}
    for role in ROLES:
        _resize(desired, old, role, needed[role])
    grown = {role: _grown(new, role, wanted[role], wanted[role] + rollout.max_surge - needed[role]) for role in ROLES}
    return Step(desired={**desired, target: grown})


def _needed(new: RevisionSeen, old: list[RevisionSeen], role: RoleName, wanted: int, rollout: Rollout) -> int:
    """Old workers that there should be."""
    if not new.canary_passed:
        # The old revision serves alone, and scales; it gives up a place only where there is no surge.
        gives = 1 if rollout.max_surge == 0 and rollout.max_unavailable > 0 else 0
        return max(0, wanted - gives)
    serving = min(new.ready.get(role, 0), new.desired.get(role, 0))
    missing = max(0, wanted - rollout.max_unavailable - serving)
    return min(missing, _total(old, role))


def _keep_pairs(needed: Counts, old: list[RevisionSeen], wanted: Mapping[RoleName, int]) -> None:
    """The last worker of a role waits for the other role's."""
    if any(needed.values()):
        for role in ROLES:
            needed[role] = max(needed[role], min(1, wanted[role], _total(old, role)))


def _resize(desired: dict[str, Counts], old: list[RevisionSeen], role: RoleName, needed: int) -> None:
    """Make it `needed`: what is missing comes to the newest; what is too many goes from the oldest, but first
    everywhere what is not ready.
    """
    surplus = _total(old, role) - needed
    if surplus < 0:
        newest = desired[old[-1].name]
        newest[role] = newest.get(role, 0) - surplus
        return
    idle = [max(0, revision.desired.get(role, 0) - revision.ready.get(role, 0)) for revision in old]
    for most in (idle, [needed + surplus] * len(old)):
        for revision, limit in zip(old, most, strict=True):
            counts = desired[revision.name]
            gone = min(surplus, limit, counts.get(role, 0))
            counts[role] = counts.get(role, 0) - gone
            surplus -= gone


def _grown(new: RevisionSeen, role: RoleName, wanted: int, room: int) -> int:
    most = min(wanted, max(0, room))
    if new.canary_passed:
        return most
    return min(most, max(1, new.desired.get(role, 0)))


def _paused(new: RevisionSeen, old: list[RevisionSeen], wanted: Mapping[RoleName, int]) -> Step:
    """All stay; what scaling adds goes to the revision with most ready workers, what it takes to that with fewest."""
    all_pods = [*old, new]
    desired = {revision.name: {role: revision.desired.get(role, 0) for role in ROLES} for revision in all_pods}
    for role in ROLES:
        missing = wanted[role] - _total(all_pods, role)
        for revision in sorted(all_pods, key=lambda one: one.ready.get(role, 0), reverse=missing > 0):
            change = max(missing, -desired[revision.name][role])
            desired[revision.name][role] += change
            missing -= change
    return Step(desired=desired)


def _total(revisions: Iterable[RevisionSeen], role: RoleName) -> int:
    return sum(revision.desired.get(role, 0) for revision in revisions)
