"""Errors of reconciliations become conditions and events of the object before they are raised.

refused by the API server, or a defect ─▶ reported at once
another failure of the API server      ─▶ after `REPORT_AFTER_FAILURES` in a row: it may pass, such as a conflict
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic

import msgspec

from tandem_operator.controller.applier import Applier
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.events import EventRecorder, ServiceEvent, events_for_conditions
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.store import Seen, ServiceKey, Store, generation_of, status_as
from tandem_operator.planning.status import AnyStatus, not_applied

logger = logging.getLogger(__name__)

REPORT_AFTER_FAILURES = 3
"""Failures in a row before the status reports them, if the reason may pass, such as a conflict. They are about two
seconds apart.
"""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The result of a reconciliation."""

    wrote: bool = False
    again_s: float | None = None
    """Seconds until the next reconciliation, even without an event."""


def rfc3339(moment: datetime) -> str:
    """As Kubernetes writes times, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ErrorReports(Generic[AnyStatus]):
    """Of the objects of one kind, whose status is a `form`."""

    def __init__(
        self,
        store: Store,
        applier: Applier,
        events: EventRecorder,
        form: type[AnyStatus],
        now: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._applier = applier
        self._events = events
        self._form = form
        self._now = now
        self._planned: dict[ServiceKey, AnyStatus] = {}
        """The planned status of the reconciliation in progress."""
        self._failures: dict[ServiceKey, int] = {}
        """Failed reconciliations in a row."""

    async def guard(
        self, key: ServiceKey, reconcile: Callable[[ServiceKey], Awaitable[ReconcileResult]]
    ) -> ReconcileResult:
        """Runs one reconciliation. Raises what it raises, after the report; `NotLeading` without one."""
        self._planned.pop(key, None)
        try:
            result = await reconcile(key)
        except NotLeading:
            raise
        except ApiError as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            if error.refused or (error.status and self._failures[key] >= REPORT_AFTER_FAILURES):
                await self._report(key, "ApplyRefused" if error.refused else "ApplyFailed", str(error))
            raise
        except Exception as error:
            text = f"the operator failed, its log has the traceback: {type(error).__name__}: {error}"
            await self._report(key, "OperatorError", text)
            raise
        self._failures.pop(key, None)
        return result

    def planned(self, key: ServiceKey, status: AnyStatus) -> None:
        """The status that the reconciliation in progress would write."""
        self._planned[key] = status

    async def post(self, about: Seen, events: Iterable[ServiceEvent]) -> None:
        """Logs and posts events."""
        for event in events:
            logger.info("%s: %s", about.key, event.note, extra={"reason": event.reason})
            await self._events.post(about, event)

    def forget(self, key: ServiceKey) -> None:
        """The object is gone."""
        self._failures.pop(key, None)
        self._planned.pop(key, None)

    async def _report(self, key: ServiceKey, reason: str, message: str) -> None:
        """Reports in the status, and by an event, why the spec was not applied."""
        seen = self._store.service(key)
        if seen is None:
            return
        before = status_as(seen, self._form)
        planned = self._planned.get(key) or msgspec.structs.replace(before, observed_generation=generation_of(seen))
        status = not_applied(planned, before, reason, message, rfc3339(self._now()))
        try:
            await self._applier.write_status(seen, status)
        except ApiError as error:
            logger.warning("cannot write the status of %s: %s", key, error)
            return
        await self.post(seen, events_for_conditions(before.conditions, status.conditions))
