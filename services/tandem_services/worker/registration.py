"""Keeps this worker's lease: one heartbeat per second, and one at once when its state changes.

Each heartbeat carries the load, and any of them registers again after Redis lost its data. The whole description goes
with the first one, when it changes, when Redis lacks it, and from time to time: with every heartbeat in a small fleet,
every `DESCRIBE_EVERY_S` in a large one. The reply may report that the lease is lost for good, that peers joined or
ended, or that the index must be published again. From time to time it names all members, as often as readers list them.

A worker ends only for a verdict that a process of its deployment has signed. A forged verdict is named in the next
heartbeat, which removes it.

`LoadMonitor` and `describe` convert the engine's statistics into the registry's fields. The heartbeat comes from this
process, so it alone proves nothing about the engine: `loop_count` in the statistics proves that the scheduler loop runs
[loop-progress].
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from tandem_engine.base.clock import Clock
from tandem_engine.base.release import RELEASE
from tandem_engine.config import Role
from tandem_engine.messages.control import EngineReady
from tandem_engine.messages.stats import MAX_STEP_S, EngineStats, LinkReport
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.cost import BROKEN_TOKEN_S, Load
from tandem_services.router.decision import WorkerView
from tandem_services.router.deployment import supersedes
from tandem_services.router.keys import DESCRIBE_EVERY_S, HEARTBEAT_S, MAX_WORKERS, SMALL_FLEET
from tandem_services.router.registry import (
    HeartbeatReply,
    LeaseStatus,
    Registry,
    WorkerRecord,
    WorkerState,
    description_digest,
)
from tandem_services.router.row_values import MAX_LABEL
from tandem_services.router.views.fleet_reader import LISTED_A_SECOND
from tandem_services.worker.config import WorkerConfig
from tandem_services.worker.index_publisher import IndexFeed
from tandem_services.worker.peers import PeerWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequences:
    """What the answers of the registry set off."""

    peer_gone: Callable[[str], None]
    fleet_changed: Callable[[], None]
    """A worker was added, changed or removed."""
    peers_missing: Callable[[], None]
    """There may be peers to probe."""
    lost: Callable[[str], None]
    """The lease is lost for good; the sentence gives the reason. The process has to end."""


@dataclass(kw_only=True, slots=True)
class Registration:
    """The heart of one incarnation."""

    registry: Registry
    describe: Callable[[], WorkerRecord]
    report_age_s: Callable[[], float]
    silent_peers: Callable[[], tuple[str, ...]]
    """Incarnations for which the engine waits without an answer."""
    feed: IndexFeed
    peers: PeerWatch
    clock: Clock
    consequences: Consequences
    registered: bool = False
    """At least one heartbeat was accepted since start."""
    offered: bool = False
    """The last accepted heartbeat reported that new work is accepted."""
    _generation: int = 0
    _members: frozenset[str] = frozenset()
    """Registered incarnations as of that generation."""
    _list_at: float = -math.inf
    """When all members are due, whatever has changed: Redis is a hint, and may hide a change."""
    _describe_at: float = -math.inf
    """When the next description is due."""
    _described: str = ""
    """Digest of the last one."""
    _forged: str = ""
    """A verdict in the last answer that no process of this deployment has signed."""
    _full: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def state_changed(self) -> None:
        """Send the next heartbeat now."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            await self.beat()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """One heartbeat. Redis away is no event: the next one registers again."""
        acknowledged = self.feed.acknowledged
        record = self.describe()
        digest, now = description_digest(record), self.clock.now()
        describe = digest != self._described or now >= self._describe_at
        listed = now >= self._list_at
        try:
            reply = await self.registry.heartbeat(
                record,
                known_generation=0 if listed else self._generation,
                report_age_s=self.report_age_s(),
                forged=self._forged,
                describe=describe,
            )
        except RedisUnavailableError:
            return
        if describe and reply.status is LeaseStatus.RENEWED:
            self._described = digest
            self._describe_at = now + min(DESCRIBE_EVERY_S, HEARTBEAT_S * (reply.workers - 1) / SMALL_FLEET)
        if listed and reply.status is LeaseStatus.RENEWED:
            self._list_at = now + reply.workers / LISTED_A_SECOND
        self.offered = reply.status is LeaseStatus.RENEWED and record.state is WorkerState.READY
        match reply.status:
            case LeaseStatus.RENEWED:
                self._renewed(reply, acknowledged)
            case LeaseStatus.FENCED:
                self._fenced(reply)
            case LeaseStatus.FULL:
                self._note_full()

    async def leave(self, *, for_memory: bool) -> None:
        """Deregister, so that no process waits for the lease to end. `for_memory`: the kernel killed the engine because
        memory was short, so gateways do not attribute its end to a request."""
        try:
            await self.registry.deregister(self.peers.own, for_memory=for_memory)
        except RedisUnavailableError:
            logger.warning("cannot deregister %s; its lease expires", self.peers.own)

    def _renewed(self, reply: HeartbeatReply, acknowledged: int) -> None:
        if not self.registered:
            logger.info("registered %s", self.peers.own)
        self.registered = True
        self._forged, self._full = "", False
        news, self._generation = reply.generation != self._generation, reply.generation
        if reply.undescribed:
            self._describe_at = -math.inf
            self.state_changed()
        members = self._members_after(reply)
        if members is not None:
            news, self._members = news or members != self._members, members
        if news:
            self.consequences.fleet_changed()
        self.peers.suspect(self.silent_peers())
        for incarnation in sorted(self.peers.update(reply.epoch, members)):
            self.consequences.peer_gone(incarnation)
        self.consequences.peers_missing()
        self.feed.check(reply.cursor, acknowledged)

    def _members_after(self, reply: HeartbeatReply) -> frozenset[str] | None:
        """None where nothing has changed."""
        if reply.members is not None:
            return frozenset(reply.members)
        if reply.joined or reply.left:
            return self._members.difference(reply.left).union(reply.joined)
        return None

    def _fenced(self, reply: HeartbeatReply) -> None:
        if reply.by:
            self.consequences.lost(_sentence(self.peers.own, reply.by))
            return
        if not self._forged:
            # Its removal should not wait for the next heartbeat. Once: it may come back as often as we ask.
            self.state_changed()
            logger.warning("ignored an unauthenticated verdict in Redis that %s is fenced", self.peers.own)
        self._forged = reply.forged

    def _note_full(self) -> None:
        if not self._full:
            logger.error("cannot register %s: the registry has %d workers already", self.peers.own, MAX_WORKERS)
        self._full = True


def _sentence(own: str, by: str) -> str:
    if supersedes(by, own):
        return f"{own} is fenced: {by} is newer and has its name"
    if by == own:
        return f"{own} is fenced: it has left the registry"
    return f"{own} is fenced: it was silent for too long, and {by} found it dead; a new incarnation can take its place"


STALL_S = 3.0
"""Without progress for this long while there is work, or without any report, the worker is not offered."""

NO_TRANSPORT = "none"
"""Transport of an engine that serves alone: nothing can be fetched from it, at any cost."""


@dataclass(kw_only=True, slots=True)
class LoadMonitor:
    """The last statistics of one engine, and when its loop last made progress."""

    clock: Clock
    role: Role = Role.BOTH
    """What the router may use it for. An operator can change it."""
    draining: bool = False
    standby: bool = False
    """Not tested by a canary yet (`worker.standby`)."""
    measuring: bool = False
    """Its rates are being measured: requests would falsify them, and wait."""
    stats: EngineStats | None = None
    _stats_at: float = 0.0
    _progress_at: float = 0.0

    def begin(self) -> None:
        """The engine is ready; its first statistics are due."""
        self._stats_at = self._progress_at = self.clock.now()

    def update(self, stats: EngineStats) -> bool:
        """Apply a report. Returns whether it has changed the state: then the registry should get it at once,
        because requests sent to a worker that has just been paused are rejected."""
        now, before = self.clock.now(), self.state
        if self.stats is None or stats.loop_count != self.stats.loop_count or not _busy(stats):
            self._progress_at = now
        self.stats = stats
        self._stats_at = now
        return self.state is not before

    @property
    def report_age_s(self) -> float:
        return self.clock.now() - self._stats_at

    @property
    def stalled_s(self) -> float:
        """How long the engine has shown no sign of life."""
        return self.clock.now() - min(self._stats_at, self._progress_at)

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        if self.stalled_s > STALL_S:
            return WorkerState.STALLED
        if self.stats is not None and self.stats.paused:
            return WorkerState.PAUSED
        return WorkerState.STANDBY if self.standby or self.measuring else WorkerState.READY

    def idle_since(self, moment: float) -> bool:
        """Whether statistics from after `moment` (monotonic seconds) show no request anywhere."""
        return self.stats is not None and self._stats_at >= moment and not _busy(self.stats)


def describe(config: WorkerConfig, ready: EngineReady, monitor: LoadMonitor, *, health_endpoint: str) -> WorkerRecord:
    """The content of each heartbeat."""
    geometry, stats = ready.geometry, monitor.stats
    details: dict[str, str | int | float] = {
        "transport": ready.transport,
        "total_pages": ready.total_pages,
        "fingerprint": geometry.fingerprint,
        "dtype": geometry.dtype,
        "device": ready.device[:MAX_LABEL],
        "kernel_target": ready.kernel_target,
        "tp_size": geometry.tp_size,
    }
    if stats is not None:
        details |= {
            "running": stats.running,
            "waiting": stats.waiting,
            "transferring": stats.transferring,
            "free_pages": stats.free_pages,
            "evictable_pages": stats.evictable_pages,
            "quarantined_pages": stats.quarantined_pages,
            "inflight": stats.inflight,
            "host_pages": stats.host_pages,
            "host_pages_used": stats.host_pages_used,
            "stored_blocks": stats.stored_blocks,
            "prompt_tokens_total": stats.prompt_tokens_total,
            "cached_tokens_total": stats.cached_tokens_total,
            "host_cached_tokens_total": stats.host_cached_tokens_total,
            "disk_cached_tokens_total": stats.disk_cached_tokens_total,
            "output_tokens_total": stats.output_tokens_total,
            "output_tokens_per_s": stats.output_tokens_per_s,
            "transfers_total": stats.transfers_total,
            "transfer_failures_total": stats.transfer_failures_total,
            "transfer_bytes_total": stats.transfer_bytes_total,
            "fetched_total": stats.prefix_fetch.fetched_total,
            "loop_count": stats.loop_count,
            "conditions": _conditions(stats.links),
        }
    return WorkerRecord(
        view=_view(config, ready, monitor.role, health_endpoint),
        state=monitor.state,
        load=_load(ready, stats),
        details=details,
        links=() if stats is None else stats.links,
    )


def drain_summary(before: EngineStats | None, after: EngineStats | None) -> str:
    """What became of the running requests between two statistics, for the log."""
    if before is None or after is None:
        return ""
    moved, failed = (
        after.moved_total - before.moved_total,
        after.move_failures_total - before.move_failures_total,
    )
    left = after.running + after.waiting + after.transferring + after.inflight
    return f": {moved} requests moved with their KV, {failed + left} to be computed again elsewhere"


def _view(config: WorkerConfig, ready: EngineReady, role: Role, health_endpoint: str) -> WorkerView:
    return WorkerView(
        worker_id=config.worker_id,
        incarnation=ready.incarnation,
        role=role,
        request_endpoint=ready.request_endpoint,
        peer_endpoint=ready.peer_endpoint,
        compat_hash=ready.compat_hash,
        release=RELEASE,
        context_length=ready.context_length,
        page_size=ready.geometry.page_size,
        model=config.model_name,
        adapters={adapter.name: adapter for adapter in ready.adapters},
        adapter_memory=ready.adapter_memory,
        health_endpoint=health_endpoint,
        tokenizer=ready.tokenizer,
        encoding=ready.encoding,
    )


def _load(ready: EngineReady, stats: EngineStats | None) -> Load:
    page_size = ready.geometry.page_size
    load = Load(
        prefill_rate=max(ready.prefill_tokens_per_s, 1.0),
        step_s=ready.decode_step_s,
        step_base_s=ready.decode_step_s,
        room_tokens=ready.total_pages * page_size,
        max_sequences=max(ready.max_running_requests, 1),
        token_bytes=ready.geometry.page_bytes * ready.geometry.tp_size / page_size,
    )
    if ready.transport == NO_TRANSPORT:
        load.transfer_rate = max(load.token_bytes, 1.0) / BROKEN_TOKEN_S
    if stats is None:
        return load
    if stats.prefill_tokens_per_s > 0:
        load.prefill_rate = stats.prefill_tokens_per_s
    if stats.step_base_s > 0.0:
        load.step_base_s = min(stats.step_base_s, MAX_STEP_S)
    load.step_fit = stats.step_fit
    load.queue_tokens = stats.waiting_tokens
    load.sequences = stats.running + stats.waiting + stats.transferring
    load.step_s = stats.decode_step_s
    rates = [link.bytes_per_s for link in stats.links if link.bytes_per_s > 0.0]
    if rates:
        load.transfer_rate = median(rates)
    if stats.host_load_pages_per_s > 0.0:
        load.host_token_s = 1.0 / (stats.host_load_pages_per_s * page_size)
    load.room_tokens = (stats.free_pages + stats.evictable_pages) * page_size
    load.kv_tokens = max(0, stats.total_pages - stats.free_pages - stats.evictable_pages) * page_size
    return load


def _conditions(links: Sequence[LinkReport]) -> str:
    """Number of links with errors and what they are, for display; "" without any."""
    counts = Counter(link.condition for link in links if link.condition)
    return "; ".join(f"{count} of {len(links)} links: {text}" for text, count in counts.most_common())


def _busy(stats: EngineStats) -> bool:
    return stats.running + stats.waiting + stats.transferring + stats.inflight > 0
