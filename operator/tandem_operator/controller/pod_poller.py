"""Polls the pods of each service once per period and acts on the results: canaries, links, autoscaling.

pods ─▶ due canaries ─▶ workers on standby are offered to the router once their revision has passed
     ─▶ metrics ─▶ links slower than expected
                ─▶ the autoscaler (mode internal): pod costs, then role flips, then replicas of pools
                                                             all results ─▶ `Findings`, which reconciles read

Lookout         polls one service
Lookouts        polls all services, many at a time, while this operator leads. A service that was never polled is
                polled at once, and its reconciles wait for that
ExternalLooks   metrics for external autoscalers, for services with `autoscaling.mode: external`. Every replica
                polls, leading or not, because it only reads, and an HPA's adapter or KEDA may query any replica.
                The leader's `Lookout` reuses these results, so that no pod is polled twice
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import httpx

from tandem_operator.api.model_service import Decision
from tandem_operator.api.types import ROLES
from tandem_operator.builders.naming import pool_name
from tandem_operator.builders.served import Served, served
from tandem_operator.controller.applier import Executor
from tandem_operator.controller.canary_runner import CanaryBook, Trials, steady
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.observations import Findings, FindingsBoard, Parts, Subject
from tandem_operator.controller.probes import OperatorMetrics
from tandem_operator.controller.reconcile import rfc3339
from tandem_operator.controller.store import WORKER_POOL, Seen, ServiceKey, Store, spec_of, status_of
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.autoscaler import (
    Autoscaler,
    Flip,
    Scaled,
    event_of,
    order_flip,
    remembered,
    scaling_config,
    worth_telling,
)
from tandem_operator.telemetry.external import ScalingFigures
from tandem_operator.telemetry.samples import LoadReader
from tandem_operator.telemetry.samples import Seen as PodsSeen
from tandem_operator.telemetry.worker_control import OrderFailedError

logger = logging.getLogger(__name__)

QUICK_S = 1.0
"""A canary that is answered so soon counts in the same turn."""


@dataclass(slots=True)
class Lookout:
    """One per service, for as long as this operator leads."""

    client: httpx.AsyncClient
    executor: Executor
    events: EventPoster
    token: Callable[[Served], Awaitable[str]]
    """The service's token for orders. Raises `OrderFailedError` while there is none."""
    trials: Trials
    external: Callable[[ServiceKey], PodsSeen | None] = lambda _: None
    """What was observed of an externally scaled service: `ExternalLooks` polls its pods."""
    clock: Callable[[], float] = time.monotonic
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    reader: LoadReader = field(init=False)
    look_at: float = -math.inf
    """When figures are read again."""

    def __post_init__(self) -> None:
        self.reader = LoadReader(client=self.client, now=self.clock)

    async def ask(self, subject: Subject, before: Findings | None) -> Findings:
        """Send the canaries that are due. `before`: None the first time, which waits for the answers, for nothing is
        planned without them; later polls do not wait for slow ones.
        """
        canaries = await self.trials.turn(subject, patience_s=None if before is None else QUICK_S)
        return replace(before or Findings(), canaries=canaries, failing=self.trials.failing)

    async def look(self, subject: Subject, known: Findings) -> Findings:
        """Read figures, if it is time to, and act on them. Raises `ApiError` when the API server does not take the
        outcome.
        """
        if self.clock() < self.look_at:
            return known
        self.look_at = self.clock() + subject.wanted.spec.autoscaling.period_seconds
        seen = await self._seen(subject)
        if seen is None:
            return known
        found = replace(known, links=seen.slow_links(), pods=seen)
        scaled = self._decide(subject, seen)
        if scaled is None:
            return replace(found, holding="")
        decisions = list(known.decisions) if known.decisions is not None else subject.status.decisions
        await self._tell(subject, decisions, scaled)
        await self._scale(subject, scaled)
        told = tuple(remembered(decisions, scaled.decisions, subject.now))
        return replace(found, decisions=told, holding=steady(known.holding, scaled.holding))

    @property
    def expecting(self) -> bool:
        """Whether the next turn should be soon."""
        return self.trials.expecting

    async def _seen(self, subject: Subject) -> PodsSeen | None:
        if subject.wanted.spec.autoscaling.mode == "external":
            return self.external(subject.service.key)
        return await self.reader.read(subject.pods)

    def close(self) -> None:
        """Canaries under way are given up."""
        self.trials.close()

    def _decide(self, subject: Subject, seen: PodsSeen) -> Scaled | None:
        pools = subject.parts.pools()
        if subject.wanted.spec.autoscaling.mode != "internal" or len(pools) < len(ROLES):
            return None
        return self.autoscaler.step(
            seen,
            scaling_config(subject.wanted),
            subject.pods,
            pools,
            revision=subject.status.revision,
            rolling_out=subject.rolling_out,
        )

    async def _tell(self, subject: Subject, known: Sequence[Decision], scaled: Scaled) -> None:
        for decision in worth_telling(known, scaled.decisions):
            kind, reason, message = event_of(decision)
            logger.info("%s: %s: %s", subject.service.key, reason, message)
            await self.events.post(subject.service, Told("Warning" if kind == "Warning" else "Normal", reason, message))

    async def _scale(self, subject: Subject, scaled: Scaled) -> None:
        namespace = subject.service.namespace
        await self.executor.annotate_costs(namespace, scaled.costs)
        for flip in scaled.flips:
            await self._flip(subject, flip)
        pools = subject.parts.pools()
        for role in ROLES:
            if scaled.pools[role] != pools[role]:
                ref = WORKER_POOL.ref(pool_name(subject.service.ref.name, role))
                await self.executor.scale(ref, namespace, scaled.pools[role])

    async def _flip(self, subject: Subject, flip: Flip) -> None:
        try:
            await order_flip(self.client, flip, await self.token(subject.wanted))
        except OrderFailedError as error:
            # The next poll shows that it serves as before, and decides again.
            logger.warning(
                "role flip failed for %s: pod %s to %s: %s", subject.service.key, flip.pod.name, flip.role, error
            )


PERIOD_S = 5.0

AT_ONCE = 32
"""Services; most of a look is waiting for pods."""


@dataclass(slots=True)
class ExternalLooks:
    """`run` it."""

    store: Store
    settings: OperatorSettings
    client: httpx.AsyncClient
    figures: ScalingFigures
    _readers: dict[ServiceKey, LoadReader] = field(default_factory=dict)
    _seen: dict[ServiceKey, PodsSeen] = field(default_factory=dict)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    def seen(self, key: ServiceKey) -> PodsSeen | None:
        """What came of the last look at a service; None before the first."""
        return self._seen.get(key)

    async def look(self) -> None:
        """At all that others scale; what is no longer among them is forgotten."""
        wanted = {
            service.key: (service, found) for service in self.store.services() if (found := self._external(service))
        }
        for key in self._readers.keys() - wanted.keys():
            del self._readers[key]
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))
        await asyncio.gather(*(self._look_at(service, found) for service, found in wanted.values()))

    def _external(self, service: Seen) -> Served | None:
        try:
            spec = spec_of(service)
        except ValueError:
            # Its status contains it.
            return None
        if service.deleting or spec.autoscaling.mode != "external":
            return None
        return served(service.ref.name, service.namespace, spec, self.settings)

    async def _look_at(self, service: Seen, wanted: Served) -> None:
        """Nothing that goes wrong with one service reaches the others."""
        key = service.key
        reader = self._readers.setdefault(key, LoadReader(client=self.client))
        pods = Parts.of(service.uid, self.store.parts(key)).pods_seen()
        try:
            async with self._room:
                seen = await reader.read(pods)
            self._seen[key] = seen
            self.figures.put((key.namespace, key.name), seen, scaling_config(wanted))
        except Exception:
            logger.exception("cannot read pods of %s", key)
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))


TICK_S = 0.5
RETRY_S = 5.0

STARTING_S = 1.0
"""Until the next poll while workers start: no watch reports when one is on standby."""

PAUSE_S = 1.0
"""Between two turns, however often pods change."""


@dataclass(slots=True)
class _Post:
    """A lookout and its schedule."""

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
            # Its reconcile reports it in the status; there is nothing to poll.
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
