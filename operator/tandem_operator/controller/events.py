"""Kubernetes events of a ModelService, as `kubectl describe` and `kubectl get events` show them.

Each transition creates one event; an unchanged state creates none. A transition is a new status, and for `Valid` and
`Degraded` also a new reason, or the same error with a new generation of the spec. A status that is not known yet, or
becomes known and is good, is no transition. Events are informational: an event that cannot be posted is logged and
dropped.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import Condition
from tandem_operator.builders.containers import Manifest
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.store import EVENT, Seen
from tandem_operator.planning.adapter_status import ACCEPTED
from tandem_operator.planning.slo import LATENCY_CALIBRATED, SLO_FEASIBLE, SLO_MET
from tandem_operator.planning.status import (
    ADAPTERS_READY,
    ARGUMENTS_ACCEPTED,
    DEGRADED,
    FAILED,
    MODEL_CACHED,
    READY,
    TRANSPORT_READY,
    VALID,
    VERSION_SKEW,
)

logger = logging.getLogger(__name__)
CONTROLLER = "tandem.dev/operator"

MAX_NOTE = 1000
"""Max. characters of the note; the API server accepts 1024 bytes."""

EVENT_CONDITIONS = {
    VALID: "True",
    READY: "True",
    DEGRADED: "False",
    VERSION_SKEW: "False",
    TRANSPORT_READY: "True",
    ARGUMENTS_ACCEPTED: "True",
    ADAPTERS_READY: "True",
    ACCEPTED: "True",
    MODEL_CACHED: "True",
    FAILED: "False",
    SLO_MET: "True",
    SLO_FEASIBLE: "True",
    LATENCY_CALIBRATED: "True",
}
"""Conditions whose changes become events, and their good status."""

ERRORS = (VALID, DEGRADED, ACCEPTED, FAILED)
"""Those of which another reason, or the same error of another generation, is an event as well."""


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """A Kubernetes event about a service or a part of it."""

    kind: Literal["Normal", "Warning"]
    reason: str
    note: str


def events_for_transition(before: ModelServiceStatus, after: ModelServiceStatus) -> list[ServiceEvent]:
    """The events for a change of status."""
    events = events_for_conditions(before.conditions, after.conditions)
    if before.revision and after.revision != before.revision:
        note = f"revision {before.revision} is replaced by {after.revision}"
        events.append(ServiceEvent("Normal", "RollingOut", note))
    return events


def events_for_conditions(before: Sequence[Condition], after: Sequence[Condition]) -> list[ServiceEvent]:
    """Of conditions in `EVENT_CONDITIONS`."""
    known = {one.type: one for one in before}
    reported = [one for one in after if one.type in EVENT_CONDITIONS]
    return [_of_condition(one) for one in reported if _is_new(known.get(one.type), one)]


def _is_new(before: Condition | None, after: Condition) -> bool:
    good = EVENT_CONDITIONS[after.type]
    if before is None:
        # The initial state becomes an event only when it is bad.
        return after.type in ERRORS and after.status != good
    if "Unknown" in (before.status, after.status):
        # What becomes known is an event when it is bad.
        return before.status != after.status and after.status not in ("Unknown", good)
    if before.status != after.status:
        return True
    changed = (before.reason, before.observed_generation) != (after.reason, after.observed_generation)
    return after.type in ERRORS and after.status != good and changed


def _of_condition(one: Condition) -> ServiceEvent:
    good = EVENT_CONDITIONS[one.type] == one.status
    note = f"{one.type} is {one.status}: {one.message or one.reason}"
    return ServiceEvent("Normal" if good else "Warning", one.reason, note)


class EventRecorder:
    """Posts events about objects, as `instance`."""

    def __init__(self, cluster: Cluster, instance: str) -> None:
        self._cluster = cluster
        self._instance = instance

    async def post(self, about: Seen, event: ServiceEvent) -> None:
        try:
            await self._cluster.create(self._manifest(about, event))
        except ApiError as error:
            logger.warning("cannot post event %s of %s: %s", event.reason, about.key, error)

    def _manifest(self, about: Seen, event: ServiceEvent) -> Manifest:
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": f"{about.ref.name}.{uuid4().hex[:16]}", "namespace": about.namespace},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": event.kind,
            "reason": event.reason,
            "note": event.note[:MAX_NOTE],
            "action": "Reconcile",
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": about.ref.api_version,
                "kind": about.ref.kind,
                "name": about.ref.name,
                "namespace": about.namespace,
                "uid": about.uid,
                "resourceVersion": str(about.version),
            },
        }
