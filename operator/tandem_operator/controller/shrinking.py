"""Which pods go when a plan leaves fewer: the emptiest, whoever made the number smaller. Pure.

Kubernetes takes the pods of a Deployment with the least pod-deletion-cost first, so their costs are noted before the
number is written: for the autoscaler's scalings, a rollout's, an HPA's and those of `kubectl scale` alike.
"""

from collections.abc import Iterable

from tandem_operator.api.roles import ROLES
from tandem_operator.builders.naming import ROLE_LABEL
from tandem_operator.controller.kinds import DEPLOYMENT
from tandem_operator.planning.observed import DeploymentSeen, Observed
from tandem_operator.planning.plan import Plan
from tandem_operator.telemetry.deletion_costs import changed_costs
from tandem_operator.telemetry.looks import Seen
from tandem_operator.telemetry.pods import PodSeen


def costs_before(plan: Plan, observed: Observed, pods: Iterable[PodSeen], seen: Seen) -> dict[str, int]:
    """New pod-deletion-costs by pod name, of Deployments that shrink and go on with some of their pods."""
    wanted = _replicas(plan)
    shrinking = [one for one in observed.workers() if 0 < wanted.get(one.name, one.replicas) < one.replicas]
    costs: dict[str, int] = {}
    everybody = list(pods)
    for one in shrinking:
        role = next(role for role in ROLES if role == one.role)
        costs |= changed_costs(_of(one, everybody), seen, pools={role}, roles={role})
    return costs


def _replicas(plan: Plan) -> dict[str, int]:
    """What it wants of Deployments of workers, by name."""
    wanted = {scaling.ref.name: scaling.replicas for scaling in plan.scale if scaling.ref.kind == DEPLOYMENT.name}
    for manifest in plan.apply:
        if manifest["kind"] == DEPLOYMENT.name and ROLE_LABEL in manifest["metadata"]["labels"]:
            wanted[manifest["metadata"]["name"]] = manifest["spec"]["replicas"]
    return wanted


def _of(deployment: DeploymentSeen, pods: Iterable[PodSeen]) -> list[PodSeen]:
    return [
        pod
        for pod in pods
        if pod.worker_role == deployment.role and pod.revision == deployment.revision and not pod.terminating
    ]
