"""How a ModelService goes: its clients' requests finish first, then workers and Redis are taken away.

    deleted ─▶ garbage collection deletes the gateways' Deployment, whose pods drain until their requests have finished
            ─▶ workers, Redis and what they need stay as long as a WorkerPool of the service, and each pool stays as
               long as a gateway pod: both are owners beside the service
            ─▶ the last gateway pod is gone ─▶ the pools go, and everything that they held

Owner references alone bring this about, without a finalizer and without an operator: a namespace or a service that is
deleted waits for no process of ours. The operator adds one thing, a bound: pods of a node that is lost are never gone.
"""

import msgspec

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.gateway import gateway_labels
from tandem_operator.builders.naming import Labels, selector_of
from tandem_operator.builders.worker import FOLLOWER
from tandem_operator.planning.status import PROGRESSING, READY, condition, settled

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
