"""`WorkerPool`: the workers of one role of a `ModelService`, whatever their revision.

Made by the operator, one per role, under a name that stays. Its `/scale` subresource lets `kubectl scale`, an HPA or
KEDA own the number of workers where `spec.autoscaling.mode` of the service is external; a rollout exchanges the
workers below it and leaves the number alone. What the workers are like follows from the service.
"""

from typing import ClassVar

from tandem_operator.api.conditions import Conditions
from tandem_operator.api.markers import Api, Count, Name, Rule
from tandem_operator.api.roles import RoleName


class WorkerPoolSpec(Api, frozen=True, kw_only=True):
    """How many workers of one role."""

    service_name: Name
    """The ModelService it belongs to."""
    role: RoleName
    """What its workers do; a worker whose role was flipped goes on counting here."""
    replicas: Count = 1
    """Workers wanted. In autoscaling mode none the service's own figure wins."""

    RULES: ClassVar = (
        Rule("self.role == oldSelf.role", "role cannot change: a pool has one role"),
        Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot change"),
    )


class WorkerPoolStatus(Api, frozen=True, kw_only=True):
    """Workers as they are."""

    observed_generation: int = 0
    """The generation of the spec that this status speaks of."""
    replicas: int = 0
    """Pods there are."""
    ready_replicas: int = 0
    """Workers that take requests."""
    selector: str = ""
    """Label selector of the pods, for the scale subresource."""
    conditions: Conditions = []
    """Available, and why not."""


class WorkerPool(Api, frozen=True, kw_only=True):
    """The workers of one role of a ModelService. Made by the operator."""

    spec: WorkerPoolSpec
    """What is wanted."""
    status: WorkerPoolStatus = WorkerPoolStatus()
    """What there is, written by the operator."""
