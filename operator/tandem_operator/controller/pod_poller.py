"""Polls the pods of each service once per period and acts on the results: canaries, links, autoscaling.

pods ─▶ due canaries ─▶ workers on standby are offered to the router once their revision has passed
     ─▶ registered adapters ─▶ the next command about one (`adapter_sync`)
     ─▶ metrics ─▶ links slower than expected
                ─▶ the autoscaler (mode internal): pod costs, then role flips, then replicas of pools
                                                             all results ─▶ `Observations`, which reconciles read

PodPoller        polls one service
PodPollers       polls all services, many at a time, while this operator leads. A service that was never polled is
                 polled at once, and its reconciles wait for that
ExternalPoller   metrics for external autoscalers, for services with `autoscaling.mode: external`. Every replica
                 polls, leading or not, because it only reads, and an HPA's adapter or KEDA may query any replica.
                 The leader's `PodPoller` reuses these results, so that no pod is polled twice
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
from tandem_operator.controller.adapter_sync import AdapterSync
from tandem_operator.controller.applier import Applier
from tandem_operator.controller.canary_runner import CanaryRunner, RevisionCanaries, steady
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.error_reports import rfc3339
from tandem_operator.controller.events import EventRecorder, ServiceEvent
from tandem_operator.controller.leader_election import NotLeading
from tandem_operator.controller.model_gateways import gateway_of, model_at, polled_pods
from tandem_operator.controller.observations import Observations, ObservationStore, Parts, Subject
from tandem_operator.controller.probes import OperatorMetrics
from tandem_operator.controller.store import WORKER_POOL, Seen, ServiceKey, Store, spec_of, status_of
from tandem_operator.scaling.policy import ScalingConfig
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.autoscaler import (
    Autoscaler,
    Flip,
    Scaled,
    event_of,
    merge_history,
    new_events,
    order_flip,
    scaling_config,
)
from tandem_operator.telemetry.external import ScalingMetrics
from tandem_operator.telemetry.samples import LoadReader, LoadReading
from tandem_operator.telemetry.slo_watch import slo_seen
from tandem_operator.telemetry.worker_control import OrderFailedError

logger = logging.getLogger(__name__)

QUICK_S = 1.0
"""The result of a canary counts in the same poll if it arrives within this time."""


@dataclass(slots=True)
class PodPoller:
    """Polls the pods of one service, while this operator leads."""

    client: httpx.AsyncClient
    applier: Applier
    events: EventRecorder
    token: Callable[[Served], Awaitable[str]]
    """The control token of the service. Raises `OrderFailedError` while there is none."""
    canary_runner: CanaryRunner
    external: Callable[[ServiceKey], LoadReading | None] = lambda _: None
    """The last load of an externally scaled service: `ExternalPoller` polls its pods."""
    clock: Callable[[], float] = time.monotonic
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    reader: LoadReader = field(init=False)
    adapters: AdapterSync = field(init=False)
    next_read: float = -math.inf
    """When metrics are read again."""

    def __post_init__(self) -> None:
        self.reader = LoadReader(client=self.client, now=self.clock)
        self.adapters = AdapterSync(self.client, self.token, self.clock)

    async def run_canaries(self, subject: Subject, before: Observations | None) -> Observations:
        """Sends due canaries. `before` is None in the first poll, which waits for the results, because plans need
        them; later polls do not wait for slow ones.
        """
        canaries = await self.canary_runner.run_due(subject, timeout_s=None if before is None else QUICK_S)
        runner = self.canary_runner
        return replace(before or Observations(), canaries=canaries, via=runner.via[0], failing=runner.failing)

    async def sync_adapters(self, subject: Subject, known: Observations) -> Observations:
        """Sends due commands about adapters, and waits for none."""
        return replace(known, adapters=await self.adapters.step(subject))

    async def poll(self, subject: Subject, known: Observations) -> Observations:
        """Reads metrics, if they are due, and acts on them. Raises `ApiError` if the API server rejects a change."""
        if self.clock() < self.next_read:
            return known
        self.next_read = self.clock() + subject.wanted.spec.autoscaling.period_seconds
        seen = await self._seen(subject)
        if seen is None:
            return known
        config, slo = scaling_config(subject.wanted), subject.wanted.spec.slo
        found = replace(
            known,
            links=seen.slow_links(),
            releases=seen.releases,
            pods=seen,
            slo=slo_seen(seen, config, slo, known.slo),
        )
        scaled = self._decide(subject, seen, config)
        if scaled is None:
            return replace(found, holding="")
        decisions = list(known.decisions) if known.decisions is not None else subject.status.decisions
        await self._post_events(subject, decisions, scaled)
        await self._scale(subject, scaled)
        history = tuple(merge_history(decisions, scaled.decisions, subject.now))
        return replace(found, decisions=history, holding=steady(known.holding, scaled.holding))

    @property
    def expecting(self) -> bool:
        """Whether the next poll should be soon."""
        return self.canary_runner.expecting or self.adapters.expecting

    async def _seen(self, subject: Subject) -> LoadReading | None:
        if subject.wanted.spec.autoscaling.mode == "external":
            return self.external(subject.service.key)
        return await self.reader.read(subject.pods, subject.model.name if subject.model is not None else "")

    def close(self) -> None:
        """Cancels canaries in flight, and waits for no command about adapters."""
        self.canary_runner.close()
        self.adapters.close()

    def _decide(self, subject: Subject, seen: LoadReading, config: ScalingConfig) -> Scaled | None:
        pools = subject.parts.pools()
        if subject.wanted.spec.autoscaling.mode != "internal" or len(pools) < len(ROLES):
            self.autoscaler.owner.forget()
            return None
        return self.autoscaler.step(
            seen,
            config,
            subject.pods,
            pools,
            revision=subject.status.revision,
            rolling_out=subject.rolling_out,
            at=self.clock(),
        )

    async def _post_events(self, subject: Subject, known: Sequence[Decision], scaled: Scaled) -> None:
        for decision in new_events(known, scaled.decisions):
            kind, reason, message = event_of(decision)
            logger.info("%s: %s: %s", subject.service.key, reason, message)
            event = ServiceEvent("Warning" if kind == "Warning" else "Normal", reason, message)
            await self.events.post(subject.service, event)

    async def _scale(self, subject: Subject, scaled: Scaled) -> None:
        namespace = subject.service.namespace
        await self.applier.annotate_costs(namespace, scaled.costs)
        for flip in scaled.flips:
            await self._flip(subject, flip)
        pools, unwritten = subject.parts.pools(), {*ROLES}
        try:
            for role in ROLES:
                if scaled.pools[role] != pools[role]:
                    ref = WORKER_POOL.ref(pool_name(subject.service.ref.name, role))
                    await self.applier.scale(ref, namespace, scaled.pools[role])
                unwritten.discard(role)
        finally:
            self.autoscaler.carried_out(self.clock(), scaled, pools, unwritten)

    async def _flip(self, subject: Subject, flip: Flip) -> None:
        try:
            await order_flip(self.client, flip, await self.token(subject.wanted))
        except OrderFailedError as error:
            # The next poll shows its unchanged role, and the autoscaler may order the flip again.
            logger.warning(
                "role flip failed for %s: pod %s to %s: %s", subject.service.key, flip.pod.name, flip.role, error
            )


PERIOD_S = 5.0

AT_ONCE = 32
"""Services polled at once; most of a poll is waiting for pods."""


@dataclass(slots=True)
class ExternalPoller:
    """Polls externally scaled services in the task of `run`."""

    store: Store
    settings: OperatorSettings
    client: httpx.AsyncClient
    figures: ScalingMetrics
    _readers: dict[ServiceKey, LoadReader] = field(default_factory=dict)
    _seen: dict[ServiceKey, LoadReading] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(PERIOD_S)

    def seen(self, key: ServiceKey) -> LoadReading | None:
        """The result of the last poll of a service; None before the first."""
        return self._seen.get(key)

    async def poll(self) -> None:
        """Polls all externally scaled services, and forgets others."""
        wanted = {
            service.key: (service, found) for service in self.store.services() if (found := self._external(service))
        }
        for key in self._readers.keys() - wanted.keys():
            del self._readers[key]
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))
        await asyncio.gather(*(self._poll_service(service, found) for service, found in wanted.values()))

    def _external(self, service: Seen) -> Served | None:
        try:
            spec = spec_of(service)
        except ValueError:
            # Its status contains it.
            return None
        if service.deleting or spec.autoscaling.mode != "external":
            return None
        return served(service.ref.name, service.namespace, spec, self.settings)

    async def _poll_service(self, service: Seen, wanted: Served) -> None:
        """Handles every error of one service, so that the others are polled."""
        key = service.key
        reader = self._readers.setdefault(key, LoadReader(client=self.client))
        pods = polled_pods(self.store, service)
        model = model_at(self.store, service)
        try:
            async with self._slots:
                seen = await reader.read(pods, model.name if model is not None else "")
            self._seen[key] = seen
            self.figures.put((key.namespace, key.name), seen, scaling_config(wanted))
        except Exception:
            logger.exception("cannot read pods of %s", key)
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))


TICK_S = 0.5
RETRY_S = 5.0

STARTING_S = 1.0
"""Seconds until the next poll while workers start: no watch reports when one is on standby."""

PAUSE_S = 1.0
"""Min. seconds between two polls, however often pods change."""


@dataclass(slots=True)
class _Entry:
    """A poller and its schedule."""

    due: float
    ended: float = 0.0
    """When its last poll ended."""
    poller: PodPoller | None = None
    at_work: bool = False

    def close(self) -> None:
        if self.poller is not None:
            self.poller.close()


class PodPollers:
    """Polls all services in the task of `run`. Calls `changed` for a service with new observations."""

    def __init__(
        self,
        store: Store,
        observations: ObservationStore,
        make: Callable[[RevisionCanaries], PodPoller],
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        *,
        leading: Callable[[], bool],
        changed: Callable[[ServiceKey], None],
        known: Callable[[ServiceKey], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._observations = observations
        self._make = make
        self._settings = settings
        self._metrics = metrics
        self._leading = leading
        self._changed = changed
        self._known = known
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._polls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled, which also cancels polls in flight."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            for poll in self._polls:
                poll.cancel()

    def tick(self) -> None:
        """Starts the polls that are due."""
        services = {
            service.uid: service
            for service in self._store.services()
            if not service.deleting and self._known(service.key)
        }
        if not self._leading():
            services.clear()
        for uid in self._entries.keys() - services.keys():
            self._entries.pop(uid).close()
        for uid, service in services.items():
            entry = self._entries.setdefault(uid, _Entry(due=self._clock()))
            if entry.due <= self._clock() and not entry.at_work:
                entry.at_work = True
                poll = asyncio.create_task(self._poll_one(entry, service))
                self._polls.add(poll)
                poll.add_done_callback(self._polls.discard)

    def wake(self, key: ServiceKey) -> None:
        """The pods of a service have changed: a canary may be due."""
        service = self._store.service(key)
        entry = self._entries.get(service.uid) if service is not None else None
        if entry is not None:
            entry.due = min(entry.due, entry.ended + PAUSE_S)

    async def _poll_one(self, entry: _Entry, service: Seen) -> None:
        """Handles every error of one service, so that the others are polled."""
        period_s = RETRY_S
        try:
            async with self._slots:
                period_s = await self._poll(entry, service)
        except NotLeading:
            logger.debug("skipped %s: another operator is the leader", service.key)
        except ApiError as error:
            self._metrics.errors.labels("poll", error.reason or str(error.status)).inc()
            logger.info("%s: %s", service.key, error)
        except Exception:
            self._metrics.errors.labels("poll", "Defect").inc()
            logger.exception("cannot poll pods of %s", service.key)
        finally:
            entry.ended = self._clock()
            entry.due = entry.ended + period_s
            entry.at_work = False

    async def _poll(self, entry: _Entry, service: Seen) -> float:
        """Returns the seconds until the next poll."""
        try:
            spec = spec_of(service)
        except ValueError:
            # Its reconcile reports it in the status; there is nothing to poll.
            self._found(service.key, Observations())
            return RETRY_S
        if entry.poller is None:
            entry.poller = self._make(RevisionCanaries(spec.rollout.canary_timeout_seconds))
        subject = self._subject(service, served(service.ref.name, service.namespace, spec, self._settings))
        found = await entry.poller.run_canaries(subject, self._observations.of(service.key))
        # Plans need the canaries; metrics may arrive later.
        self._found(service.key, found)
        found = await entry.poller.sync_adapters(subject, found)
        self._found(service.key, found)
        self._found(service.key, await entry.poller.poll(subject, found))
        period_s = spec.autoscaling.period_seconds
        return min(period_s, STARTING_S) if entry.poller.expecting else period_s

    def _found(self, key: ServiceKey, observations: Observations) -> None:
        if self._observations.put(key, observations):
            self._changed(key)

    def _subject(self, service: Seen, wanted: Served) -> Subject:
        parts = Parts.of(service.uid, self._store.parts(service.key))
        return Subject(
            service=service,
            wanted=wanted,
            status=status_of(service),
            parts=parts,
            pods=polled_pods(self._store, service),
            now=rfc3339(datetime.now(UTC)),
            gateway=gateway_of(self._store, service, self._settings),
            model=model_at(self._store, service),
        )
