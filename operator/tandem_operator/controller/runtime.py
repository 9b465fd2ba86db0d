"""Builds and runs one operator.

    HTTP port ─▶ API server and CRDs available ─▶ kopf watches ─┬─▶ full list ─▶ workers reconcile services
                                                                └─▶ lease ─▶ leader or candidate
    SIGTERM ─▶ running reconciliations finish, the lease is released, kopf ends

A part that fails unexpectedly ends the process, which is then restarted, so that no half of an operator keeps running.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import kopf
from kubernetes.aio.client.api_client import ApiClient

from tandem_engine.base.addresses import EVERY_ADDRESS
from tandem_operator.controller.applier import Applier, SecretLookup
from tandem_operator.controller.cache_reconcile import CachePoller, CacheReconciler
from tandem_operator.controller.canary_runner import CanaryRequest, CanaryRunner, RevisionCanaries, SendCanary
from tandem_operator.controller.cluster import ApiError, Cluster, connected, wait_for_cluster, watched_kinds
from tandem_operator.controller.events import EventRecorder
from tandem_operator.controller.gateway_reconcile import EveryReconciler, GatewayReconciler
from tandem_operator.controller.leader_election import Election, ElectionConfig, Leadership
from tandem_operator.controller.observations import ObservationStore
from tandem_operator.controller.pod_poller import ExternalPoller, PodPoller, PodPollers
from tandem_operator.controller.probes import OperatorMetrics, probe_app, serving
from tandem_operator.controller.reconcile import Reconciler
from tandem_operator.controller.store import MODEL_GATEWAY, POD, ServiceKey, Store
from tandem_operator.controller.watch import Resync, registry_for
from tandem_operator.controller.workqueue import Dispatcher
from tandem_operator.planning.observed import Canary
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.pods import ANSWER_S
from tandem_operator.telemetry.worker_control import run_canary

logger = logging.getLogger(__name__)

FINISH_S = 10.0
"""Running reconciliations may take so long when the operator is terminated."""

SILENT_S = 60.0
"""An event loop or an election that has not moved for so long is beyond help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """The settings of the command line."""

    settings: OperatorSettings = field(default_factory=OperatorSettings)
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    workers: int = 8
    """Services that are looked at at the same time."""
    election: ElectionConfig | None = None
    """None: this operator is the only one."""
    http_host: str = EVERY_ADDRESS
    http_port: int = 8080


def fresh_identity() -> str:
    """Identity in the leader election, which no other process has, not even an earlier one of the same pod."""
    return f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}"


async def run(options: RuntimeOptions) -> None:
    """Until SIGTERM. Raises what a part of it failed with."""
    _end_by_signal()
    metrics = OperatorMetrics()
    operator: Operator | None = None

    def live() -> str:
        return operator.liveness_error() if operator is not None else ""

    def ready() -> str:
        return operator.readiness_error() if operator is not None else "waiting for the API server and the CRDs"

    async with (
        serving(
            probe_app(metrics.registry, live, ready, metrics.scaling.answer), options.http_host, options.http_port
        ) as port,
        connected() as client,
    ):
        logger.info("serving /metrics, /livez and /readyz", extra={"port": port})
        operator = await Operator.create(options, client, metrics)
        await operator.run()


def _end_by_signal() -> None:
    """Until kopf takes SIGTERM: the first process of a container gets no signals that it does not handle."""
    task = asyncio.current_task()
    assert task is not None, "run() is run as a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class Operator:
    """Make it with `create`, then `run` it."""

    @staticmethod
    async def create(options: RuntimeOptions, client: ApiClient, metrics: OperatorMetrics) -> "Operator":
        """Waits for the API server and for the CRDs."""
        reader = Cluster(client, metrics, lambda: None)
        apis = await wait_for_cluster(reader)
        logger.info("the cluster serves %s", apis)
        settings = replace(options.settings, apis=apis)
        return Operator(replace(options, settings=settings), client, metrics)

    def __init__(self, options: RuntimeOptions, client: ApiClient, metrics: OperatorMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._moved = time.monotonic()
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        identity = options.election.identity if options.election is not None else fresh_identity()
        self._leadership = self._elect(options.election, client) if options.election is not None else None
        cluster = Cluster(client, metrics, self._leadership.check if self._leadership is not None else lambda: None)
        self._store = Store()
        self._observations = ObservationStore()
        secrets = SecretLookup(cluster)
        applier = Applier(cluster, self._store, secrets)
        events = EventRecorder(cluster, identity)
        reconciler = Reconciler(self._store, self._observations, applier, secrets, events, options.settings)

        def known(key: ServiceKey) -> bool:
            return self._resync.knows(key)

        def changed(key: ServiceKey) -> None:
            self._dispatcher.changed(key)

        self._pods = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=httpx.Limits(max_connections=256))
        gateways = GatewayReconciler(self._store, applier, secrets, events, options.settings)
        self._caches = CachePoller(
            self._store,
            self._pods,
            leading=lambda: self._resync.synced.is_set() and self._leading(),
            changed=changed,
        )
        caches = CacheReconciler(self._store, applier, secrets, events, options.settings, self._caches.of)
        every = EveryReconciler(reconciler, gateways, caches)
        self._dispatcher = Dispatcher(self._store, every, metrics, self._leading, known=known)

        def make_poller(book: RevisionCanaries) -> PodPoller:
            canary_runner = CanaryRunner(self._pods, secrets.token, self._canary(), book)
            return PodPoller(self._pods, applier, events, secrets.token, canary_runner, self._external.seen)

        self._pollers = PodPollers(
            self._store,
            self._observations,
            make_poller,
            options.settings,
            metrics,
            leading=lambda: self._resync.synced.is_set() and self._leading(),
            changed=self._dispatcher.changed,
            known=known,
        )
        self._external = ExternalPoller(self._store, options.settings, self._pods, metrics.scaling)
        self._kinds = watched_kinds(options.settings.apis)
        self._resync = Resync(cluster, self._store, self._kinds, options.namespaces, self._dispatcher.changed)

    async def run(self) -> None:
        """Until terminated. Raises the failure of a part."""
        registry = registry_for(self._kinds, self._on_event, self._start, self._finish)
        namespaces = self._options.namespaces
        await kopf.operator(
            registry=registry, clusterwide=not namespaces, namespaces=list(namespaces), stop_flag=self._stop
        )
        if self._failure is not None:
            raise self._failure

    def liveness_error(self) -> str:
        """Why it should be started again; empty when it should not."""
        silent = time.monotonic() - self._moved
        return f"no progress for {silent:.0f} s" if silent > SILENT_S else ""

    def readiness_error(self) -> str:
        """What it still waits for; empty when it has listed the cluster, leader or not."""
        return "" if self._resync.synced.is_set() else "objects have not been listed yet"

    def _canary(self) -> SendCanary | None:
        """None when canaries are switched off."""

        async def send(ask: CanaryRequest, token: str) -> Canary:
            return await run_canary(self._pods, ask.gateway, token, pair=ask.pair, model=ask.model)

        return send if self._options.settings.canaries else None

    def _elect(self, config: ElectionConfig, client: ApiClient) -> Leadership:
        election = Election(config, time.monotonic, lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
        leases = Cluster(client, self._metrics, lambda: None)
        return Leadership(election, leases, began=self._began, ended=self._ended)

    def _leading(self) -> bool:
        return self._leadership is None or self._leadership.leading

    def _began(self) -> None:
        self._metrics.leader.set(1)
        self._dispatcher.begin()

    def _ended(self) -> None:
        self._metrics.leader.set(0)
        self._dispatcher.end()
        self._observations.clear()

    def _on_event(self, kind: str, event: str | None, body: Any) -> None:
        key = self._dispatcher.on_event(kind, event, body)
        if kind == POD.name:
            # The pods of a ModelGateway are those of all services behind it.
            for each in (key, *(self._store.related(key) if key.kind == MODEL_GATEWAY.name else ())):
                self._pollers.wake(each)
        if event is None and self._resync.synced.is_set():
            self._resync.soon()

    async def _start(self) -> None:
        parts: list[Coroutine[Any, Any, None]] = [
            self._resync.run(),
            self._once_synced(),
            self._pulse(),
            self._pollers.run(),
            self._external.run(),
            self._caches.run(),
        ]
        if self._leadership is not None:
            parts.append(self._leadership.run())
        parts += [self._dispatcher.work() for _ in range(self._options.workers)]
        self._tasks = [asyncio.create_task(part) for part in parts]
        for task in self._tasks:
            task.add_done_callback(self._ended_early)
        if self._leadership is None:
            self._began()

    async def _once_synced(self) -> None:
        await self._resync.synced.wait()
        self._dispatcher.ready()
        if self._leading():
            self._dispatcher.begin()
        await asyncio.Event().wait()

    async def _pulse(self) -> None:
        while True:
            self._moved = time.monotonic()
            await asyncio.sleep(SILENT_S / 10)

    async def _finish(self) -> None:
        self._dispatcher.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self._dispatcher.settled()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pods.aclose()
        if self._leadership is not None:
            try:
                await self._leadership.resign()
                logger.info("released the lease")
            except ApiError as error:
                logger.warning("cannot release the lease, the next leader waits until it expires: %s", error)

    def _ended_early(self, task: "asyncio.Task[None]") -> None:
        """A part of the operator never ends by itself."""
        if task.cancelled():
            return
        self._failure = task.exception() or RuntimeError(f"{task.get_name()} ended")
        logger.error("operator exits: a component failed", exc_info=self._failure)
        self._stop.set()
