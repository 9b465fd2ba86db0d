"""Pods of pools and workers of roles: two ways of counting the same workers.

A WorkerPool counts the pods of its Deployments, whatever they serve as: a worker that has flipped goes on counting
there, and there it comes back after a restart. The law of scaling counts who serves in which role.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.scaling.law import ScalingConfig
from tandem_operator.telemetry.flips import Flip

Counts = dict[RoleName, int]
OTHER: dict[RoleName, RoleName] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pods of each pool, and how many of the other pool's pods serve in each role."""

    pools: Counts
    lent: Counts
    """By the role they serve in: pods of the other pool. Never more than that pool has."""

    @staticmethod
    def of(pools: Mapping[RoleName, int], lent: Mapping[RoleName, int]) -> "PoolCounts":
        """A pool that has been made smaller than the pods it has lent lends no more than it has."""
        return PoolCounts(
            {role: pools[role] for role in ROLES}, {role: min(lent[role], pools[OTHER[role]]) for role in ROLES}
        )

    @property
    def serving(self) -> Counts:
        """Workers of each role. Pods that are wanted and not there yet will serve as their pool says."""
        return {role: self.pools[role] + self.lent[role] - self.lent[OTHER[role]] for role in ROLES}

    def after(self, flips: Iterable[Flip]) -> "PoolCounts":
        lent = dict(self.lent)
        for flip in flips:
            if flip.pod.worker_role == flip.role:
                lent[OTHER[flip.role]] -= 1
            else:
                lent[flip.role] += 1
        return PoolCounts.of(self.pools, {role: max(0, lent[role]) for role in ROLES})

    def pools_for(self, wanted: Mapping[RoleName, int], config: ScalingConfig) -> Counts:
        """Pods of each pool so that `wanted` workers serve in each role. Of a role that shrinks, lent ones go first.

        No pool leaves its bounds for that: more than `maxReplicas` pods are never made, wherever they would serve.
        """
        pools, serving = dict(self.pools), self.serving
        for role in ROLES:
            change = wanted[role] - serving[role]
            back = min(max(0, -change), self.lent[role])
            pools[OTHER[role]] -= back
            pools[role] += change + back
        return {role: min(max(pools[role], config.bounds(role).least), config.bounds(role).most) for role in ROLES}
