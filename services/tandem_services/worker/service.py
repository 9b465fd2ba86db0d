"""One worker: an engine process, its lease, its index and its health port.

    start    Redis answers → health port → engine process → `EngineReady` → heartbeats, index feed
    serve    the engine talks to gateways and peers itself; this process reports and forwards commands
    standby  with --standby the router sends no requests until the worker is offered (`worker.standby`)
    role     POST /role: first the engine changes, then the registry, at once; same incarnation, same index
    drain    SIGTERM or POST /drain: not ready, state `draining` in the registry at once, `Drain` to the engine, which
             migrates its running requests; wait until it is idle or the bound is over, `Shutdown`, deregister, exit 0
    exit     the engine exits, or the lease is lost (fenced): deregister at once and exit non-zero, so that the pod
             controller restarts this worker as a new incarnation

The parts share nothing but the event loop; this module connects them and determines when the worker ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.progress import read_progress
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import (
    DecodeElsewhere,
    Drain,
    DrainWanted,
    EngineFailed,
    EngineReady,
    OrderDone,
    OrderRefused,
    PeerGone,
    ReplayCache,
    Shutdown,
)
from tandem_engine.messages.stats import EngineStats, LinkReport
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.health import Health
from tandem_services.common.metrics import new_registry
from tandem_services.common.redis_client import BACKGROUND_TIMEOUT_S, BreakerState, RedisClient
from tandem_services.common.tokens import OrderAccess, token_for
from tandem_services.router.deployment import Deployment
from tandem_services.router.index import BlockIndex
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import Registry, WorkerRecord, WorkerState
from tandem_services.router.starting import StartingBoard
from tandem_services.router.views.fleet_reader import FleetReader
from tandem_services.worker.config import WorkerConfig, new_incarnation
from tandem_services.worker.engine_process import EngineChild, EngineLink, OrderRefusedError, Subscribers, engine_argv
from tandem_services.worker.http_api import BUSY, AdapterReport, HealthServer, WorkerProbes, build_app
from tandem_services.worker.index_publisher import IndexFeed
from tandem_services.worker.metrics import ServiceNumbers, WorkerCollector
from tandem_services.worker.peers import PeerAnnouncements, PeerChecks, PeerExits, PeerWatch, WarmLinks
from tandem_services.worker.rates import RatesOrder
from tandem_services.worker.registration import Consequences, LoadMonitor, Registration, describe, drain_summary
from tandem_services.worker.standby import Standby
from tandem_services.worker.start_reports import StartReports
from tandem_services.worker.tracing import WorkerTraces

EXIT_OK = 0
EXIT_FAILED = 1

EXIT_ENGINE_REFUSED = 3
"""The engine reported why it cannot start: an unusable checkpoint or flag."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The sentence is for the log."""

    status: int
    reason: str


@dataclass(slots=True)
class FirstEnding:
    """Of one worker. Made in its event loop."""

    _ending: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def say(self, status: int, reason: str) -> None:
        """The first call counts."""
        if not self._ending.done():
            self._ending.set_result(Ending(status, reason))

    async def wait(self) -> Ending:
        """Until the first call."""
        return await self._ending


logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class NamedTasks:
    """Run until they return, or until `cancel`."""

    failed: Callable[[str], None]
    """Called with the name of a task that raised; the error is in the log."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def cancel(self, *, keep: Collection[str]) -> None:
        """End all but those named in `keep`."""
        cancelled = [task for task in self._tasks if task.get_name() not in keep]
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for what is under way. Call at shutdown."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())
            self.failed(task.get_name())


PROGRESS_FILE = "progress"
"""Of the engine, in this process's own folder, unless `tandem up` reads it too."""

SETTLE_S = 1.0
"""A request routed here just before the drain may still be on its way: idle counts only after this."""

IDLE_POLL_S = 0.1
ORDER_TIMEOUT_S = 1.0

SHUTDOWN_GRACE_S = 10.0
"""The engine closes its transports after `Shutdown`."""


class WorkerService:
    """One incarnation of one worker. `run` once."""

    def __init__(self, config: WorkerConfig, context: IpcContext, folder: Path, clock: Clock) -> None:
        self.incarnation = new_incarnation(config.worker_id)
        deployment = Deployment.of(context.keys)
        keys = Keys(config.cluster, deployment.namespace)
        self._order_access = OrderAccess(
            token=token_for(context.keys),
            hosts=AllowedHosts.of(config.allowed_hosts, listening=(config.host, config.health_host)),
            needs_token=not config.remote_orders,
        )
        self._progress_file = config.progress_file or folder / PROGRESS_FILE
        self._config = replace(config, progress_file=self._progress_file)
        self._clock = clock
        self._redis = RedisClient(config.redis, timeout_s=BACKGROUND_TIMEOUT_S)
        self._link = EngineLink(context=context, folder=folder)
        self._monitor = LoadMonitor(clock=clock, role=config.role, standby=config.standby)
        self._health = Health()
        self._ready: EngineReady | None = None
        self._drain_began: float | None = None
        self._ending = FirstEnding()
        self._stopping = False
        self._tasks = NamedTasks(failed=self._task_failed)
        self._traces = None if config.tracing is None else WorkerTraces(config.tracing)
        library = FunctionLibrary(self._redis)
        registry = Registry(library=library, keys=keys, deployment=deployment)
        fleet = FleetReader(registry=registry, clock=clock)
        self._start_reports = StartReports(
            board=StartingBoard(library=library, keys=keys, deployment=deployment),
            config=config,
            incarnation=self.incarnation,
            progress_file=self._progress_file,
            loaded=lambda: self._ready is not None,
            clock=clock,
        )
        peers = PeerWatch(clock=clock, own=self.incarnation)
        self._peer_checks = PeerChecks(
            registry=registry, fleet=fleet, watch=peers, context=context, gone=self._notify_peer_gone
        )
        self._feed, self._registration, self._introductions, self._standby = self._build_registration(
            registry, fleet, peers
        )
        self._rates = RatesOrder(
            context=context,
            monitor=self._monitor,
            ready=lambda: self._ready,
            state_changed=self._registration.state_changed,
        )
        self._peer_exits = PeerExits(fleet=fleet, order=self._link.order, clock=clock)
        self._warm = WarmLinks(
            clock=clock,
            timeout_s=config.await_links_s,
            named=lambda: self._introductions.named,
            links=self._links,
        )
        self._health_server = HealthServer(
            build_app(self._probes()),
            config.health_host,
            config.health_port,
            advertised=config.host,
            token=self._order_access.token,
        )

    @property
    def health_endpoint(self) -> str:
        """http:// address of the probes."""
        return self._health_server.endpoint

    async def run(self) -> int:
        """Serve until drained, fenced or without an engine; returns the exit status.

        Raises `RedisUnavailableError` or `StartupError` when the worker cannot start at all.
        """
        try:
            await self._redis.require(wait_s=self._config.redis_start_timeout_s)
            child = await EngineChild.start(
                engine_argv(self._config, incarnation=self.incarnation, control=self._link.endpoint)
            )
            if self._traces is not None:
                # After the fork: its thread must not be copied.
                self._traces.open(incarnation=self.incarnation, model=self._config.model_name)
            self._tasks.start(self._health_server.run_until_closed(), "health")
            self._tasks.start(self._link.run(self._subscribers()), "control")
            self._tasks.start(self._watch_engine(child), "engine")
            self._tasks.start(self._limit_start(), "start-limit")
            self._tasks.start(self._start_reports.run(), "start-reports")
            ending = await self._ending.wait()
            log = logger.info if ending.status == EXIT_OK else logger.error
            log("worker %s exits: %s", self.incarnation, ending.reason)
            await self._stop(child)
            return ending.status
        finally:
            await self._close()

    def drain(self) -> None:
        """Begin to drain. Again: end without waiting any longer."""
        if self._ready is None or self._monitor.draining:
            self._ending.say(EXIT_OK, "stopped before it was idle")
            return
        logger.info("draining %s", self.incarnation)
        self._drain_began = self._clock.now()
        self._monitor.draining = True
        self._health.drain()
        self._registration.state_changed()
        self._tasks.start(self._finish_and_end(), "drain")

    # Wiring

    def _build_registration(
        self, registry: Registry, fleet: FleetReader, peers: PeerWatch
    ) -> tuple[IndexFeed, Registration, PeerAnnouncements, Standby]:
        feed = IndexFeed(
            index=BlockIndex(library=registry.library, keys=registry.keys),
            incarnation=self.incarnation,
            page_size=lambda: self._describe().view.page_size,
            clock=self._clock,
            ask_replay=lambda: self._link.order(ReplayCache()),
            reachable=lambda: self._redis.breaker.state is BreakerState.CLOSED,
        )
        peer_announcements = PeerAnnouncements(
            fleet=fleet,
            own=lambda: self._describe().view,
            order=self._link.order,
            observe=self._peer_checks.observe,
        )
        registration = Registration(
            registry=registry,
            describe=self._describe,
            report_age_s=lambda: self._monitor.report_age_s,
            silent_peers=lambda: () if self._monitor.stats is None else self._monitor.stats.quarantined_for,
            feed=feed,
            peers=peers,
            clock=self._clock,
            consequences=Consequences(
                peer_gone=self._notify_peer_gone,
                fleet_changed=peer_announcements.fleet_changed,
                peers_missing=self._ask_missing_peers,
                lost=lambda reason: self._ending.say(EXIT_FAILED, reason),
            ),
        )
        standby = Standby(
            on=self._config.standby,
            fleet=fleet,
            own=lambda: self._describe().view,
            clock=self._clock,
            ended=self._offer,
        )
        return feed, registration, peer_announcements, standby

    def _probes(self) -> WorkerProbes:
        self._health.add_check("engine", self._check_engine)
        self._health.add_check("scheduler", self._check_progress)
        self._health.add_check(
            "generation", lambda: "paused by an operator" if self._monitor.state is WorkerState.PAUSED else None
        )
        self._health.add_check("registry", lambda: None if self._registration.registered else "not registered")
        self._health.add_check("links", self._check_links)
        self._health.stand_by_until(self._standby.check)
        metrics = new_registry()
        metrics.register(WorkerCollector(lambda: self._monitor.stats, self._numbers))
        if self._traces is not None:
            metrics.register(self._traces)
        return WorkerProbes(
            health=self._health,
            registry=metrics,
            stalled_s=lambda: 0.0 if self._ready is None else self._monitor.stalled_s,
            links=self._links,
            adapters=lambda: AdapterReport.of(self._ready),
            audit=self._link.audit,
            drain=self.drain,
            operate=self._link.operate,
            set_role=self._set_role,
            offer=self._order_offer,
            hold=self._standby.hold,
            measure_rates=self._rates.measure,
            order_access=self._order_access,
            model=self._config.model_name,
        )

    def _subscribers(self) -> Subscribers:
        return Subscribers(
            ready=self._engine_ready,
            failed=self._engine_failed,
            stats=self._engine_reported,
            kv_events=self._feed.accept,
            ended=lambda message: None if self._traces is None else self._traces.record(message),
            drain_wanted=self._on_drain_wanted,
        )

    # Orders of an operator

    async def _set_role(self, role: Role, *, timeout_s: float) -> OrderDone:
        """Serve as `role`; the registry gets it as soon as the engine has changed. See `SetRole`."""
        if self._monitor.draining:
            raise _refusal(BUSY, f"{self.incarnation} is draining and takes no other role")
        if self._ready is not None and self._ready.transport == "none" and role is not Role.BOTH:
            raise _refusal(ConfigError.code, f"role {role} needs --transport nixl: nothing could be handed over")
        within_s = self._config.drain_timeout_s
        done = await self._link.operate(
            lambda nonce: DecodeElsewhere(nonce=nonce, wanted=role is Role.PREFILL, within_s=within_s),
            timeout_s=timeout_s,
        )
        logger.info("%s changed its role to %s from %s", self.incarnation, role, self._monitor.role)
        self._monitor.role = role
        self._registration.state_changed()
        self._introductions.fleet_changed()
        return msgspec.structs.replace(done, message=f"serving as {role}")

    def _order_offer(self) -> str | None:
        """What keeps it from being offered; None when it is."""
        if self._ready is None:
            return "the engine loads the model; there is nothing to offer yet"
        self._standby.offer("by order")
        return None

    def _offer(self) -> None:
        self._monitor.standby = False
        self._registration.state_changed()

    # Reports of the engine

    def _engine_ready(self, ready: EngineReady) -> None:
        if ready.incarnation != self.incarnation:
            self._ending.say(EXIT_FAILED, f"the engine calls itself {ready.incarnation}")
            return
        before, self._ready = self._ready, ready
        if before is not None:
            names = ", ".join(adapter.name for adapter in ready.adapters) or "none"
            logger.info("engine of %s: compat_hash %s, adapters: %s", self.incarnation, ready.compat_hash, names)
            self._registration.state_changed()
            self._introductions.fleet_changed()
            return
        logger.info("engine of %s is ready at %s", self.incarnation, ready.request_endpoint)
        self._monitor.begin()
        self._tasks.start(self._registration.run(), "registration")
        self._tasks.start(self._feed.run(), "index-feed")
        self._tasks.start(self._introductions.run(), "peer_announcements")
        self._tasks.start(self._standby.run(), "standby")

    def _engine_reported(self, stats: EngineStats) -> None:
        for peer in self._peer_exits.unfollowed(stats.fenced_writers):
            self._tasks.start(self._peer_exits.follow(peer), f"peer-exit-{peer.incarnation}")
        if self._monitor.update(stats):
            self._registration.state_changed()

    def _engine_failed(self, failed: EngineFailed) -> None:
        if self._ready is None:
            self._ending.say(EXIT_ENGINE_REFUSED, f"the engine cannot start ({failed.code}): {failed.message}")
        else:
            self._ending.say(EXIT_FAILED, f"the engine failed ({failed.code}): {failed.message}")

    def _on_drain_wanted(self, wanted: DrainWanted) -> None:
        if not self._monitor.draining:
            logger.info("engine of %s requests a drain: %s", self.incarnation, wanted.reason)
            self.drain()

    def _describe(self) -> WorkerRecord:
        assert self._ready is not None, "heartbeats begin when the engine is ready"
        return describe(self._config, self._ready, self._monitor, health_endpoint=self.health_endpoint)

    def _numbers(self) -> ServiceNumbers:
        return ServiceNumbers(
            registered=self._registration.registered,
            offered=self._registration.offered,
            standby=self._standby.on,
            index_replays=self._feed.replays,
            redis_failures=self._redis.failures,
            role=self._monitor.role,
            draining_s=None if self._drain_began is None else self._clock.now() - self._drain_began,
            stats_age_s=self._monitor.report_age_s,
            ready=self._ready,
        )

    def _links(self) -> tuple[LinkReport, ...]:
        return () if self._monitor.stats is None else self._monitor.stats.links

    def _check_engine(self) -> str | None:
        if self._ready is not None:
            return None
        progress = read_progress(self._progress_file)
        return "loading the model" if progress is None else f"loading the model ({progress})"

    def _check_progress(self) -> str | None:
        if self._ready is None or self._monitor.state is not WorkerState.STALLED:
            return None
        return f"no progress for {self._monitor.stalled_s:.0f} s"

    def _check_links(self) -> str | None:
        """Not called before there are any: the wait for them counts from then on."""
        return self._warm.check() if self._registration.registered else None

    # Endings

    async def _watch_engine(self, child: EngineChild) -> None:
        status = await child.wait()
        # A refusal with its reason may still be in the socket.
        await asyncio.sleep(IDLE_POLL_S)
        if not self._stopping:
            self._ending.say(EXIT_FAILED, child.how_ended(status))

    async def _limit_start(self) -> None:
        await asyncio.sleep(self._config.start_timeout_s)
        if self._ready is None:
            self._ending.say(EXIT_FAILED, f"the engine was not ready within {self._config.start_timeout_s:.0f} s")

    async def _finish_and_end(self) -> None:
        await self._link.order(Drain())
        before = self._monitor.stats
        began = self._clock.now()
        while not self._monitor.idle_since(began + SETTLE_S):
            if self._clock.now() - began > self._config.drain_timeout_s:
                logger.warning("%s is not idle after %.0f s", self.incarnation, self._config.drain_timeout_s)
                break
            await asyncio.sleep(IDLE_POLL_S)
        summary = drain_summary(before, self._monitor.stats)
        self._ending.say(EXIT_OK, f"drained in {self._clock.now() - began:.1f} s{summary}")

    def _task_failed(self, name: str) -> None:
        self._ending.say(EXIT_FAILED, f"its {name} task failed")

    async def _stop(self, child: EngineChild) -> None:
        """Deregister first, so that no more requests are sent here; then the engine."""
        self._stopping = True
        await self._tasks.cancel(keep={"health", "engine"})
        if self._ready is not None:
            await self._registration.leave(for_memory=child.killed_for_memory)
        if child.process.returncode is None:
            if self._ready is not None:
                with contextlib.suppress(TimeoutError):  # an engine that ends by itself takes no order
                    await asyncio.wait_for(self._link.order(Shutdown()), ORDER_TIMEOUT_S)
                await child.stop(grace_s=SHUTDOWN_GRACE_S)
            else:
                await child.stop(grace_s=0.0)

    async def _close(self) -> None:
        self._health_server.close()
        await self._tasks.cancel(keep={"health"})
        await self._tasks.settle()
        self._link.close()
        await self._redis.close()
        if self._traces is not None:
            self._traces.close()

    def _ask_missing_peers(self) -> None:
        if self._peer_checks.pending:
            self._tasks.start(self._peer_checks.run_due(), "peer-checks")

    def _notify_peer_gone(self, incarnation: str) -> None:
        logger.info("fenced peer %s", incarnation)
        self._tasks.start(self._link.order(PeerGone(incarnation=incarnation)), "peer-gone")


def _refusal(code: str, message: str) -> OrderRefusedError:
    return OrderRefusedError(OrderRefused(nonce=0, code=code, message=message))
