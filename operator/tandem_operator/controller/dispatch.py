"""From what is heard to looks: notes events, queues the services they concern, and has workers look at them.

    heard ─▶ Store ─▶ queue (while leading) ─▶ workers ─▶ Reconciler.look

Nobody looks before everything has been listed once: a plan made from half of what there is would undo the other half.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.kinds import MODEL_SERVICE, ServiceKey
from tandem_operator.controller.leadership import NotLeading
from tandem_operator.controller.metrics import OperatorMetrics
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.queue import WorkQueue
from tandem_operator.controller.reconcile import Looked, Reconciler
from tandem_operator.controller.store import Store

logger = logging.getLogger(__name__)

_TRANSIENT = (0, 404, 409, 429, 502, 503, 504)
"""Answers after which another attempt is likely to succeed: no reason to alarm anybody yet."""

AFTER_WRITES_S = 1.0
"""Until the look that follows one which wrote something: by then its own events are here."""


class Dispatcher:
    """Workers and what they work on. `leading` is asked before each look, and `known`, whether all of the service's
    namespace has been listed.
    """

    def __init__(
        self,
        store: Store,
        reconciler: Reconciler,
        metrics: OperatorMetrics,
        leading: Callable[[], bool],
        *,
        known: Callable[[ServiceKey], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._known = known
        self._reconciler = reconciler
        self._metrics = metrics
        self._leading = leading
        self._clock = clock
        self._synced = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._at_work = 0
        self._queue: WorkQueue[ServiceKey] = WorkQueue(clock)
        metrics.queue.set_function(lambda: len(self._queue))
        metrics.services.set_function(lambda: len(store.services()))

    def heard(self, kind: str, event: str | None, body: Mapping[str, Any]) -> ServiceKey:
        """An event of a watch; the service that it concerns."""
        self._metrics.watch_events.labels(kind).inc()
        seen = Seen.of(body)
        if event == "DELETED":
            self._store.drop(seen)
        elif not self._store.put(seen):
            return seen.key
        self.changed(seen.key)
        return seen.key

    def changed(self, key: ServiceKey, after_s: float = 0.0) -> None:
        """Something about this service is new."""
        if self._leading() and key.name:
            self._queue.add(key, after_s)

    def begin(self) -> None:
        """This operator leads now: look at everything."""
        for service in self._store.services():
            self._queue.add(service.key)

    def end(self) -> None:
        """It leads no more."""
        self._queue.clear()

    def ready(self) -> None:
        """Everything has been listed."""
        self._synced.set()

    async def work(self) -> None:
        """One worker, until cancelled."""
        await self._synced.wait()
        while True:
            key = await self._queue.get()
            self._at_work += 1
            self._idle.clear()
            try:
                await self._look(key)
            finally:
                self._at_work -= 1
                if not self._at_work:
                    self._idle.set()

    async def settled(self) -> None:
        """Waits until nobody looks at anything."""
        await self._idle.wait()

    async def _look(self, key: ServiceKey) -> None:
        begun = self._clock()
        result = await self._result(key)
        self._metrics.reconciles.labels(result).inc()
        self._metrics.reconcile_seconds.observe(self._clock() - begun)

    async def _result(self, key: ServiceKey) -> str:
        if not self._leading() or not self._known(key):
            self._queue.done(key)
            return "stopped"
        try:
            looked = await self._reconciler.look(key)
        except NotLeading:
            self._queue.done(key)
            return "stopped"
        except ApiError as error:
            self._failed(key, error.reason or str(error.status))
            level = logging.INFO if error.status in _TRANSIENT else logging.WARNING
            logger.log(level, "%s: %s", key, error, extra=_about(key))
            return "failed"
        except Exception:
            # A defect in one service's handling must not stop the others'.
            self._failed(key, "Defect")
            logger.exception("reconcile failed for %s", key, extra=_about(key))
            return "failed"
        return self._succeeded(key, looked)

    def _succeeded(self, key: ServiceKey, looked: Looked) -> str:
        self._queue.done(key)
        if looked.wrote:
            # What somebody else wrote a moment before is in the API server's answers to our writes, and in the store
            # by them: its event is old news when it comes.
            self._queue.add(key, AFTER_WRITES_S)
        if looked.again_s is not None:
            self._queue.add(key, looked.again_s)
        return "changed" if looked.wrote else "unchanged"

    def _failed(self, key: ServiceKey, reason: str) -> None:
        self._metrics.errors.labels("reconcile", reason).inc()
        self._queue.failed(key)


def _about(key: ServiceKey) -> dict[str, str]:
    return {"object_namespace": key.namespace, "object_name": key.name, "object_kind": MODEL_SERVICE.name}
