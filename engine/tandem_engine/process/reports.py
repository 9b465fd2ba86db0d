"""What the worker service hears of the engine without asking, and the answer to an audit.

at start, and with other weights    `EngineReady`
once a turn                         KV events, traced requests that have ended; that the engine is to be drained
twice a second, in long steps too   `EngineStats`

A queue that is full drops a message: the worker service sees the gap in the sequence of events and asks for a replay.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem_engine.engine import Engine
from tandem_engine.messages.control import AuditReport, DrainWanted, EngineReady, EngineToWorker
from tandem_engine.messages.ended_requests import MAX_REPORTED, EndedRequests
from tandem_engine.messages.kv_events import KvEvent, KvEventBatch
from tandem_engine.process.channels import Control
from tandem_engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

STATS_PERIOD = 0.5
MAX_EVENTS_PER_BATCH = 256


@dataclass(kw_only=True, slots=True)
class Reports:
    """Of one engine."""

    engine: Engine
    control: Control | None
    """None without a worker service: nobody is told anything."""
    watchdog: Watchdog
    """Hears with every report that the engine lives."""
    ready: EngineReady
    _event_sequence: int = 0
    _stats_at: float = 0.0
    _drain_wanted: bool = False

    def tell(self, message: EngineToWorker) -> None:
        """Send `message`, or drop it."""
        if self.control is not None and not self.control.send(message):
            logger.warning("worker service does not read; dropped %s", type(message).__name__)

    def announce(self) -> None:
        """What this engine is: at start, and when its weights were replaced."""
        self.ready = msgspec.structs.replace(
            self.ready, geometry=self.engine.geometry, compat_hash=self.engine.compat_hash
        )
        self.tell(self.ready)

    def publish(self) -> None:
        """Once a turn: everything that is new."""
        self._pass_on_departure()
        events = self.engine.memory.cache.take_events()
        if events:
            self._send_events(events)
        self._report_ended()
        self.publish_stats()

    def publish_stats(self) -> None:
        """If it is time for them."""
        now = time.monotonic()
        if now >= self._stats_at:
            self._stats_at = now + STATS_PERIOD
            self.tell(self.engine.stats())
            self.watchdog.progressed()

    def replay_cache(self) -> None:
        """The whole prefix cache as events."""
        self._send_events(self.engine.memory.cache.snapshot_events())

    def audit(self, nonce: int) -> None:
        """Answer an `Audit`."""
        report = self.engine.audit()
        self.tell(
            AuditReport(
                nonce=nonce,
                problems=report.problems,
                idle=self.engine.scheduler.idle,
                free_pages=report.free,
                tree_pages=report.tree,
                private_pages=report.private,
                held_pages=report.held,
            )
        )

    def _pass_on_departure(self) -> None:
        """A node of this engine is to leave: whoever knows the fleet has requests move before it does."""
        reason = self.engine.departure.reason
        if reason is not None and not self._drain_wanted:
            self._drain_wanted = True
            logger.info("requesting drain: %s", reason)
            self.tell(DrainWanted(reason=reason))

    def _report_ended(self) -> None:
        log = self.engine.scheduler.ended
        ended = log.take()
        for start in range(0, len(ended), MAX_REPORTED):
            chunk = tuple(ended[start : start + MAX_REPORTED])
            message = EndedRequests(requests=chunk, lost=log.lost)
            if self.control is None or not self.control.send(message):
                log.lost += len(chunk)

    def _send_events(self, events: Sequence[KvEvent]) -> None:
        for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
            self._event_sequence += 1
            chunk = tuple(events[start : start + MAX_EVENTS_PER_BATCH])
            self.tell(KvEventBatch(sequence=self._event_sequence, events=chunk))
