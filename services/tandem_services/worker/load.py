"""What the engine says about itself, turned into what the registry is told.

The heartbeat comes from this process, so it alone would prove nothing about the engine: `loop_count` in the
statistics proves that the scheduler loop turns [loop-progress].
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tandem_engine.clock import Clock
from tandem_engine.config import Role
from tandem_engine.messages.control import EngineReady
from tandem_engine.messages.engine_stats import EngineStats, LinkReport
from tandem_services.router.choice import WorkerView
from tandem_services.router.cost import BROKEN_TOKEN_S, Load
from tandem_services.router.registry import WorkerRecord, WorkerState
from tandem_services.worker.config import WorkerConfig

STALL_S = 3.0
"""Without progress for this long while there is work, or without any report, the worker is not offered."""


NO_TRANSPORT = "none"
"""What an engine says that serves alone: nothing can be fetched from it, at whatever price."""


@dataclass(kw_only=True, slots=True)
class LoadMonitor:
    """The last statistics of one engine, and when its loop last made progress."""

    clock: Clock
    role: Role = Role.BOTH
    """What the router may use it for. An operator can change it."""
    draining: bool = False
    standby: bool = False
    """Nobody has tried it yet (`worker.standby`)."""
    stats: EngineStats | None = None
    _stats_at: float = 0.0
    _progress_at: float = 0.0

    def begin(self) -> None:
        """The engine is ready; its first statistics are due."""
        self._stats_at = self._progress_at = self.clock.now()

    def update(self, stats: EngineStats) -> bool:
        """Take a report. Returns whether the state has changed by it: then the registry should hear at once, for
        whoever is sent to a worker that has just been paused is sent away again."""
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
        return WorkerState.STANDBY if self.standby else WorkerState.READY

    def idle_since(self, moment: float) -> bool:
        """Whether statistics from after `moment` (monotonic seconds) show no request anywhere."""
        return self.stats is not None and self._stats_at >= moment and not _busy(self.stats)


def describe(config: WorkerConfig, ready: EngineReady, monitor: LoadMonitor, *, health_endpoint: str) -> WorkerRecord:
    """What the registry is told with each heartbeat."""
    geometry, stats = ready.geometry, monitor.stats
    details: dict[str, str | int | float] = {
        "transport": ready.transport,
        "total_pages": ready.total_pages,
        "fingerprint": geometry.fingerprint,
        "dtype": geometry.dtype,
        "health_endpoint": health_endpoint,
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
        view=_view(config, ready, monitor.role),
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


def _view(config: WorkerConfig, ready: EngineReady, role: Role) -> WorkerView:
    return WorkerView(
        worker_id=config.worker_id,
        incarnation=ready.incarnation,
        role=role,
        request_endpoint=ready.request_endpoint,
        peer_endpoint=ready.peer_endpoint,
        compat_hash=ready.compat_hash,
        context_length=ready.context_length,
        page_size=ready.geometry.page_size,
        model=config.model_name,
    )


def _load(ready: EngineReady, stats: EngineStats | None) -> Load:
    page_size = ready.geometry.page_size
    load = Load(
        prefill_rate=max(ready.prefill_tokens_per_s, 1.0),
        step_s=ready.decode_step_s,
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
    load.queue_tokens = stats.waiting_tokens
    load.sequences = stats.running + stats.waiting + stats.transferring
    load.step_s = stats.decode_step_s
    rates = [link.bytes_per_s for link in stats.links if link.bytes_per_s > 0.0]
    if rates:
        load.transfer_rate = median(rates)
    if stats.host_load_pages_per_s > 0.0:
        load.host_token_s = 1.0 / (stats.host_load_pages_per_s * page_size)
    load.room_tokens = (stats.free_pages + stats.evictable_pages) * page_size
    return load


def _conditions(links: Sequence[LinkReport]) -> str:
    """What is wrong with how many links, for whoever watches the registry; "" when nothing is."""
    counts = Counter(link.condition for link in links if link.condition)
    return "; ".join(f"{count} of {len(links)} links: {text}" for text, count in counts.most_common())


def _busy(stats: EngineStats) -> bool:
    return stats.running + stats.waiting + stats.transferring + stats.inflight > 0
