"""The lookouts of all services: one turn each period, many at a time, while this operator leads.

A service that has never been looked at has its first turn at once; reconciles of it wait for that.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tandem_operator.builders.served import Served, served
from tandem_operator.controller.canaries import CanaryBook
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.findings import Findings, FindingsBoard
from tandem_operator.controller.kinds import ServiceKey
from tandem_operator.controller.leadership import NotLeading
from tandem_operator.controller.lookout import Lookout
from tandem_operator.controller.metrics import OperatorMetrics
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.reconcile import rfc3339
from tandem_operator.controller.resources import spec_of, status_of
from tandem_operator.controller.store import Store
from tandem_operator.controller.subject import Subject
from tandem_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

TICK_S = 0.5
RETRY_S = 5.0
STARTING_S = 1.0
"""Until the next turn while workers start: no watch tells when one stands by."""
PAUSE_S = 1.0
"""Between two turns, however often pods change."""
AT_ONCE = 32
"""Turns at the same time: most of one is waiting for pods."""


@dataclass(slots=True)
class _Post:
    """A lookout at its post."""

    due: float
    ended: float = 0.0
    """When its last turn did."""
    lookout: Lookout | None = None
    at_work: bool = False

    def leave(self) -> None:
        if self.lookout is not None:
            self.lookout.close()


class Lookouts:
    """`run` it. `changed` is called for a service about which something new was found."""

    def __init__(
        self,
        store: Store,
        findings: FindingsBoard,
        make: Callable[[CanaryBook], Lookout],
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        *,
        leading: Callable[[], bool],
        changed: Callable[[ServiceKey], None],
        known: Callable[[ServiceKey], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._findings = findings
        self._make = make
        self._settings = settings
        self._metrics = metrics
        self._leading = leading
        self._changed = changed
        self._known = known
        self._clock = clock
        self._posts: dict[str, _Post] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._turns: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled; turns under way end with it."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            for turn in self._turns:
                turn.cancel()

    def tick(self) -> None:
        """Begin the turns that are due."""
        services = {
            service.uid: service
            for service in self._store.services()
            if not service.deleting and self._known(service.key)
        }
        if not self._leading():
            services.clear()
        for uid in self._posts.keys() - services.keys():
            self._posts.pop(uid).leave()
        for uid, service in services.items():
            post = self._posts.setdefault(uid, _Post(due=self._clock()))
            if post.due <= self._clock() and not post.at_work:
                post.at_work = True
                turn = asyncio.create_task(self._turn(post, service))
                self._turns.add(turn)
                turn.add_done_callback(self._turns.discard)

    def wake(self, key: ServiceKey) -> None:
        """Its pods have changed: a canary may be due."""
        service = self._store.service(key)
        post = self._posts.get(service.uid) if service is not None else None
        if post is not None:
            post.due = min(post.due, post.ended + PAUSE_S)

    async def _turn(self, post: _Post, service: Seen) -> None:
        """Nothing that goes wrong with one service reaches the others."""
        period_s = RETRY_S
        try:
            async with self._room:
                period_s = await self._look(post, service)
        except NotLeading:
            logger.debug("skipped %s: another operator is the leader", service.key)
        except ApiError as error:
            self._metrics.errors.labels("lookout", error.reason or str(error.status)).inc()
            logger.info("%s: %s", service.key, error)
        except Exception:
            self._metrics.errors.labels("lookout", "Defect").inc()
            logger.exception("cannot poll pods of %s", service.key)
        finally:
            post.ended = self._clock()
            post.due = post.ended + period_s
            post.at_work = False

    async def _look(self, post: _Post, service: Seen) -> float:
        """Time until the next turn."""
        try:
            spec = spec_of(service)
        except ValueError:
            # Its reconcile says so in the status; there is nothing to ask anybody.
            self._found(service.key, Findings())
            return RETRY_S
        if post.lookout is None:
            post.lookout = self._make(CanaryBook(spec.rollout.canary_timeout_seconds))
        subject = self._subject(service, served(service.ref.name, service.namespace, spec, self._settings))
        asked = await post.lookout.ask(subject, self._findings.of(service.key))
        # Plans need the canaries; figures may take their time.
        self._found(service.key, asked)
        self._found(service.key, await post.lookout.look(subject, asked))
        period_s = spec.autoscaling.period_seconds
        return min(period_s, STARTING_S) if post.lookout.expecting else period_s

    def _found(self, key: ServiceKey, findings: Findings) -> None:
        if self._findings.put(key, findings):
            self._changed(key)

    def _subject(self, service: Seen, wanted: Served) -> Subject:
        parts = Parts.of(service.uid, self._store.parts(service.key))
        return Subject(
            service=service,
            wanted=wanted,
            status=status_of(service),
            parts=parts,
            pods=parts.pods_seen(),
            now=rfc3339(datetime.now(UTC)),
        )
