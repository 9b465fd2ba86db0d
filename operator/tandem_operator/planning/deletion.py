"""Deletion of a ModelService: its clients' requests finish first, then workers and Redis are deleted.

    deleted ─▶ garbage collection deletes the gateways' Deployment, whose pods drain until their requests have finished
            ─▶ workers, Redis and their dependencies stay while a WorkerPool of the service exists, and each pool stays
               while a gateway pod exists: both are owners in addition to the service
            ─▶ the last gateway pod is deleted ─▶ then the pools, and everything that they own

Owner references alone achieve this, without a finalizer and without an operator: deleting a service or a namespace
never waits for a process of ours. The operator only adds a bound, because pods of a lost node are never deleted.
"""

import msgspec

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import condition
from tandem_operator.builders.gateway import gateway_labels
from tandem_operator.builders.naming import Labels, selector_of
from tandem_operator.builders.worker import FOLLOWER
from tandem_operator.planning.status import PROGRESSING, READY, settled

FORMER_FINALIZER = "tandem.dev/drain"
"""Operators of former releases set it, and the service could go only while one of them ran. It is taken off."""

DRAIN_MARGIN_S = 15
"""Beyond the grace period of the gateway pods: the API server, the kubelet and the end of a process take their time."""

HELD_COMPONENTS = frozenset({"worker", FOLLOWER, "redis", "secret"})
"""Components whose objects gateways need until they have drained."""


def drain_bound_s(grace_s: float) -> float:
    """Longest time that pools hold workers for gateway pods of this grace period."""
    return grace_s + DRAIN_MARGIN_S


def gateway_selector(service: str) -> Labels:
    """Labels of the pods that drain first."""
    return selector_of(gateway_labels(service))


def leaving(before: ModelServiceStatus, generation: int, now: str) -> ModelServiceStatus:
    """The status of a service that is deleted in the foreground: it stays until its gateways have drained."""
    changed = (
        condition(READY, False, "Deleting", "deleted: running requests finish, new ones are rejected"),
        condition(PROGRESSING, True, "Deleting", "gateways drain"),
    )
    kept = [one for one in before.conditions if one.type not in (READY, PROGRESSING)]
    timed = settled([*changed, *kept], before.conditions, generation=generation, now=now)
    return msgspec.structs.replace(before, observed_generation=generation, conditions=timed)
