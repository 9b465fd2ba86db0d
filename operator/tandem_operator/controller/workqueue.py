"""Which services to reconcile, and when: each service once at a time, a burst of events as one reconciliation.

    add ─▶ due now ─┐                    ┌─ done ─▶ forgotten until the next event
    later ─▶ due at ┴─▶ take ─▶ working ─┼─ done, but added in the meantime ─▶ due now
                                         └─ failed ─▶ due after a growing pause with jitter

An event during the reconciliation of its service is not lost: the service is reconciled again afterwards.

`Dispatcher` records events, queues the affected services, and runs the workers that reconcile them:

    event ─▶ Store ─▶ queue (while leading) ─▶ workers ─▶ Reconciler.reconcile

No service is reconciled before everything was listed once: a plan from half of the state would undo the other half.
"""

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.error_reports import ReconcileResult
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.probes import OperatorMetrics
from tandem_operator.controller.store import Seen, ServiceKey, Store

Key = TypeVar("Key", bound=Hashable)
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0


def back_off(failures: int, jitter: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds until the next attempt after so many failures in a row: twice as long each time, spread by a half, so
    that what failed together does not come back together.
    """
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30))
    return jitter(longest / 2, longest)


class Schedule(Generic[Key]):
    """The schedule, without waiting: every method gets the time, in seconds."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0
        self._working: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._again)

    def add(self, key: Key, at: float) -> None:
        """Look at it at that time, or earlier if that was wanted already."""
        if key in self._working:
            self._again[key] = min(at, self._again.get(key, at))
            return
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))

    def take(self, now: float) -> Key | None:
        """The one that has been due for longest; it is ours until `done` or `failed`. None: nothing is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._working.add(key)
        return key

    def next_at(self) -> float | None:
        """When the next one is due; None without any."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def done(self, key: Key) -> None:
        """It went well."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, now: float) -> float:
        """It failed; returns the pause until the next attempt, unless an event requires one earlier."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        pause = back_off(failures)
        # Events in the meantime do not shorten it: they are often of our own half-done writes.
        self._again.pop(key, None)
        self._release(key)
        self.add(key, now + pause)
        return pause

    def clear(self) -> None:
        """Forget what was wanted. What is being worked on stays so until it is done."""
        self._due.clear()
        self._heap.clear()
        self._again.clear()
        self._failures.clear()

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        again = self._again.pop(key, None)
        if again is not None:
            self.add(key, again)

    def _drop_stale(self) -> None:
        """Heap entries that an earlier due time has replaced."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)


class WorkQueue(Generic[Key]):
    """A `Schedule` to wait at."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._schedule: Schedule[Key] = Schedule()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._schedule)

    def add(self, key: Key, after_s: float = 0.0) -> None:
        self._schedule.add(key, self._clock() + after_s)
        self._changed.set()

    async def get(self) -> Key:
        """Waits for the next one that is due."""
        while True:
            key = self._schedule.take(self._clock())
            if key is not None:
                return key
            self._changed.clear()
            await self._until_due()

    def done(self, key: Key) -> None:
        self._schedule.done(key)
        self._changed.set()

    def failed(self, key: Key) -> float:
        pause = self._schedule.failed(key, self._clock())
        self._changed.set()
        return pause

    def clear(self) -> None:
        self._schedule.clear()

    async def _until_due(self) -> None:
        at = self._schedule.next_at()
        try:
            async with asyncio.timeout(None if at is None else max(0.0, at - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return


logger = logging.getLogger(__name__)

_TRANSIENT = (0, 404, 409, 429, 502, 503, 504)
"""Errors after which another attempt is likely to succeed: no reason for an alert yet."""

AFTER_WRITES_S = 1.0
"""Until the look that follows one which wrote something: by then its own events are here."""


class Reconciles(Protocol):
    """Reconciles one ModelService or ModelGateway."""

    async def reconcile(self, key: ServiceKey) -> ReconcileResult:
        """Raises `ApiError` and `NotLeading`."""
        ...


class Dispatcher:
    """Workers and what they work on. Each reconcile first checks `leading`, and `known`: whether all of the service's
    namespace has been listed.
    """

    def __init__(
        self,
        store: Store,
        reconciler: Reconciles,
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

    def on_event(self, kind: str, event: str | None, body: Mapping[str, Any]) -> ServiceKey:
        """An event of a watch; the service that it concerns."""
        self._metrics.watch_events.labels(kind).inc()
        seen = Seen.of(body)
        former = self._store.key_of(seen.uid)
        if event == "DELETED":
            self._store.drop(seen)
        elif not self._store.put(seen):
            return seen.key
        self.changed(seen.key)
        if former is not None and former != seen.key:
            # Its label was edited: the service that it was of lacks it now.
            self.changed(former)
        for related in self._store.related(seen.key):
            self.changed(related)
        return seen.key

    def changed(self, key: ServiceKey, after_s: float = 0.0) -> None:
        """Something about this service is new."""
        if self._leading() and key.name:
            self._queue.add(key, after_s)

    def begin(self) -> None:
        """This operator leads now: look at everything."""
        for service in self._store.roots():
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
        """Waits until no reconcile runs."""
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
            result = await self._reconciler.reconcile(key)
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
        return self._succeeded(key, result)

    def _succeeded(self, key: ServiceKey, result: ReconcileResult) -> str:
        self._queue.done(key)
        if result.wrote:
            # Another writer's change a moment before is in the API server's answers to our writes, and in the store
            # by them: its event is old news when it comes.
            for each in (key, *self._store.related(key)):
                self._queue.add(each, AFTER_WRITES_S)
        if result.again_s is not None:
            self._queue.add(key, result.again_s)
        return "changed" if result.wrote else "unchanged"

    def _failed(self, key: ServiceKey, reason: str) -> None:
        self._metrics.errors.labels("reconcile", reason).inc()
        self._queue.failed(key)


def _about(key: ServiceKey) -> dict[str, str]:
    return {"object_namespace": key.namespace, "object_name": key.name, "object_kind": key.kind}
