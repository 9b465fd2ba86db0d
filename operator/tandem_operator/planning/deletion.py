"""How a ModelService goes: its clients' requests finish first, then everything that it owns is taken away. Pure.

    deleted ─▶ gateways are scaled to 0 and drain, while workers and Redis are still there to answer what is under way
            ─▶ the last gateway pod is gone, or the bound has passed ─▶ the finalizer goes, and the rest with it

Without the finalizer garbage collection would take gateways, workers and Redis at once. It is there for that alone.
"""

from dataclasses import dataclass

import msgspec

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.gateway import DRAIN_NOTICE_S, gateway_labels
from tandem_operator.builders.naming import Labels, gateway_name, selector_of
from tandem_operator.planning.conditions import PROGRESSING, READY, condition, settled
from tandem_operator.planning.observed import Observed

FINALIZER = "tandem.dev/drain"

DRAIN_MARGIN_S = 15
"""Beyond the drain itself: the API server, the kubelet and the end of a process take their time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Farewell:
    """What to do next."""

    stop_gateways: bool = False
    """Scale their Deployment to 0."""
    finished: bool = False
    """Take the finalizer away."""
    late: bool = False
    """The bound has passed with gateways still there."""


def drain_bound_s(drain_seconds: int) -> float:
    """Longest time that the finalizer holds the service."""
    return drain_seconds + DRAIN_NOTICE_S + DRAIN_MARGIN_S


def gateway_selector(service: str) -> Labels:
    """Labels of the pods that drain first."""
    return selector_of(gateway_labels(service))


def next_farewell(service: str, observed: Observed, gateway_pods: int, elapsed_s: float, bound_s: float) -> Farewell:
    """`gateway_pods`: those that are there, terminating ones too. `elapsed_s`: since it was deleted."""
    gateways = observed.deployment(gateway_name(service))
    stop = gateways is not None and gateways.replicas > 0
    if elapsed_s >= bound_s:
        return Farewell(finished=True, late=stop or gateway_pods > 0)
    return Farewell(stop_gateways=stop, finished=not stop and gateway_pods == 0)


def leaving(before: ModelServiceStatus, generation: int, now: str) -> ModelServiceStatus:
    """The status meanwhile."""
    changed = (
        condition(READY, False, "Deleting", "deleted: requests under way finish, new ones are refused"),
        condition(PROGRESSING, True, "Deleting", "gateways drain"),
    )
    kept = [one for one in before.conditions if one.type not in (READY, PROGRESSING)]
    timed = settled([*changed, *kept], before.conditions, generation=generation, now=now)
    return msgspec.structs.replace(before, observed_generation=generation, conditions=timed)
