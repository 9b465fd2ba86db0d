"""Which pods of a shrinking pool go first: the ReplicaSet controller takes the cheapest.

Emptiest first, for what runs on a pod that goes has to move. Pods that serve in the role of which there are too many
go before those that were lent to the other one.
"""

from collections.abc import Collection, Iterable

from tandem_operator.api.roles import RoleName
from tandem_operator.telemetry.looks import Seen
from tandem_operator.telemetry.pods import PodSeen

KEPT = 1_000_000
"""Above whatever can be outstanding on one worker."""
UNKNOWN = KEPT // 2
"""Of a pod that says nothing: it may be full. Those that are not ready go before all others anyway."""


def changed_costs(
    workers: Iterable[PodSeen], seen: Seen, *, pools: Collection[RoleName], roles: Collection[RoleName]
) -> dict[str, int]:
    """New costs by pod name, where they differ. `pools` are those that shrink, `roles` those with too many workers."""
    costs = {pod.name: cost_of(pod, seen, roles) for pod in workers if pod.worker_role in pools}
    before = {pod.name: pod.deletion_cost for pod in workers}
    return {name: cost for name, cost in costs.items() if cost != before[name]}


def cost_of(pod: PodSeen, seen: Seen, roles: Collection[RoleName]) -> int:
    """Of one pod."""
    figures = seen.workers.get(pod.name)
    outstanding = UNKNOWN if figures is None else min(round(figures.outstanding), UNKNOWN)
    return outstanding if seen.serves(pod) in roles else outstanding + KEPT
