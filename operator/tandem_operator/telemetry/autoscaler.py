"""The autoscaler of one ModelService: what was seen → how many pods each WorkerPool should have, and who changes roles.

    seen ─▶ workers of each role: all that are wanted, pending and warming ones included, flipped ones where they serve
         ─▶ scaling.law.decide ─▶ flips: the emptiest that can, before any pod comes or goes
         ─▶ pods of each pool; of a pool that shrinks, what each pod would cost

Pure: the caller brings pods and figures, and carries the outcome out, costs first, then flips, then pools. What is lost
with its process are the windows alone: a new leader holds until it has looked twice, and waits the whole window before
anything shrinks [figures-or-hold].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.scaling.law import Decision, Memory, ScalingConfig, decide
from tandem_operator.telemetry.deletion_costs import changed_costs
from tandem_operator.telemetry.flips import Flip, candidates, flips_of
from tandem_operator.telemetry.looks import Seen
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.pool_counts import Counts, PoolCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """What there should be."""

    pools: Counts
    """Replicas of each WorkerPool."""
    flips: tuple[Flip, ...] = ()
    decisions: tuple[Decision, ...] = ()
    costs: Mapping[str, int] = field(default_factory=dict)
    """pod-deletion-cost by pod name, where it is to be another than now. Empty unless a pool shrinks: an annotation
    written each period would be load on the API server for nothing."""
    holding: str = ""
    """Why nothing can be decided; "" while figures can be trusted."""


@dataclass(kw_only=True, slots=True)
class Autoscaler:
    """One per ModelService. It remembers needs over time."""

    memory: Memory = field(default_factory=Memory)

    def step(
        self,
        seen: Seen,
        config: ScalingConfig,
        pods: Sequence[PodSeen],
        pools: Mapping[RoleName, int],
        *,
        revision: str,
        rolling_out: bool = False,
    ) -> Scaled:
        """`pools`: `spec.replicas` of each. `revision`: the one that is served. While it `rolling_out`, nobody changes
        roles: those that would are about to go."""
        now = {role: pools[role] for role in ROLES}
        if seen.load is None:
            return _hold(now, seen.reason)
        workers = [pod for pod in pods if pod.worker_role is not None and not pod.terminating]
        counts = PoolCounts.of(now, flips_of(workers, seen))
        law = replace(config, flip_roles=config.flip_roles and not rolling_out)
        outcome = decide(seen.load, counts.serving, self.memory, law)
        self.memory = outcome.memory
        if seen.load.trouble():
            return Scaled(pools=now, decisions=outcome.decisions, holding=outcome.decisions[0].reason)
        flips = candidates(outcome.flips, [pod for pod in workers if pod.revision == revision], seen)
        flipped = counts.after(flips)
        wanted = flipped.pools_for(outcome.wanted, config)
        return Scaled(
            pools=wanted,
            flips=flips,
            decisions=outcome.decisions,
            costs=changed_costs(
                workers,
                seen,
                pools={role for role in ROLES if wanted[role] < now[role]},
                roles={role for role in ROLES if outcome.wanted[role] < flipped.serving[role]},
            ),
        )


def _hold(pools: Counts, reason: str) -> Scaled:
    total = sum(pools.values())
    held = Decision(role="both", action="hold", before=total, after=total, reason=reason)
    return Scaled(pools=pools, decisions=(held,), holding=reason)
