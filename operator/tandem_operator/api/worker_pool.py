"""`WorkerPool`: the workers of one role of a `ModelService`, whatever their revision.

Made by the operator, one per role, under a name that stays. Its `/scale` subresource lets `kubectl scale`, an HPA or
KEDA own the number of workers where `spec.autoscaling.mode` of the service is external; a rollout exchanges the
workers below it and leaves the number alone. What the workers are like follows from the service.
"""

from typing import ClassVar

from tandem_operator.api.types import Api, Conditions, Count, Name, RoleName, Rule


class WorkerPoolSpec(Api, frozen=True, kw_only=True):
    """Number of workers of one role."""

    service_name: Name
    """ModelService to which it belongs."""
    role: RoleName
    """Role of its workers; a worker with a flipped role still counts here."""
    replicas: Count = 1
    """Desired number of workers. In autoscaling mode none the number of the service applies."""

    RULES: ClassVar = (
        Rule("self.role == oldSelf.role", "role cannot change: a pool has one role"),
        Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot change"),
    )


class WorkerPoolStatus(Api, frozen=True, kw_only=True):
    """Observed workers."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    replicas: int = 0
    """Number of pods."""
    ready_replicas: int = 0
    """Workers that serve requests."""
    selector: str = ""
    """Label selector of the pods, for the scale subresource."""
    conditions: Conditions = []
    """Available, with its reason."""


class WorkerPool(Api, frozen=True, kw_only=True):
    """The workers of one role of a ModelService. Created by the operator."""

    spec: WorkerPoolSpec
    """Desired state."""
    status: WorkerPoolStatus = WorkerPoolStatus()
    """Observed state, written by the operator."""
