"""The loop of an engine process: take inputs, step, report, and sleep when idle.

    Start   `serve`: load model → build engine → self-test → bind the request socket → `EngineReady` to the service
    Loop    gateways' requests → worker's commands → one scheduler step → `Reports`: KV events, statistics
    Idle    sleep on all sockets and the transport's descriptor, also while requests wait; nothing spins
    Stop    SIGTERM, `Shutdown`, or the worker service gone: abort the rest, notify every client, close

Everything runs on one thread, the scheduler's; the forward and NIXL have separate threads.

`Reports` are what the worker service gets unasked, and the reply to an audit:

    at start, and with other weights    `EngineReady`
    once per iteration                  KV events, traced requests that have finished, a requested drain
    twice a second, in long steps too   `EngineStats`

A full queue drops a message: the worker service detects the gap in the sequence of events and requests a replay.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tandem_engine.base.errors import RankLostError, ReleaseSkewError
from tandem_engine.base.freed_memory import AtRest
from tandem_engine.base.names import RequestId
from tandem_engine.base.recording import recording
from tandem_engine.base.release import skew
from tandem_engine.engine import Engine
from tandem_engine.engine.control import Operations
from tandem_engine.engine.watchdog import Watchdog
from tandem_engine.ipc.channels import PairChannel, Poller, RouterChannel
from tandem_engine.messages.control import (
    Audit,
    AuditReport,
    Drain,
    DrainWanted,
    EngineReady,
    EngineToWorker,
    MeetPeers,
    PeerEnded,
    PeerGone,
    ReplayCache,
    Shutdown,
    WorkerToEngine,
)
from tandem_engine.messages.kv_events import KvEvent, KvEventBatch
from tandem_engine.messages.outputs import EngineReply, OutputBatch, Pong, Taken, TokenOutput
from tandem_engine.messages.requests import (
    AbortRequest,
    CloseSession,
    EngineRequest,
    GenerateRequest,
    Ping,
    TokenizerRequest,
)
from tandem_engine.messages.stats import MAX_REPORTED, EndedRequests
from tandem_engine.scheduler.finishing import error_finish
from tandem_engine.tokenizer.bundle import TokenizerBundle, tokenizer_part

Requests = RouterChannel[EngineRequest, EngineReply]
Control = PairChannel[WorkerToEngine, EngineToWorker]


@dataclass(kw_only=True, slots=True)
class Outbox:
    """Sends outputs to gateways. One that is gone gets nothing more and its requests are aborted."""

    channel: Requests | None = None
    """None until the engine is built and the socket bound."""
    unreachable: set[bytes] = field(default_factory=set)

    def __call__(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        if self.channel is not None and not self.channel.send(client, OutputBatch(outputs=outputs)):
            self.unreachable.add(client)


logger = logging.getLogger(__name__)
STATS_PERIOD = 0.5
REPLAY_PERIOD = 1.0
"""Seconds between two replays of the cache where errors keep its events from being sent."""
MAX_EVENTS_PER_BATCH = 256


@dataclass(kw_only=True, slots=True)
class Reports:
    """Of one engine."""

    engine: Engine
    control: Control | None
    """None without a worker service: nothing is reported."""
    watchdog: Watchdog
    """Notified before each report that the engine is alive."""
    ready: EngineReady
    _event_sequence: int = 0
    _stats_at: float = 0.0
    _adapter_changes: tuple[int, int, int] = (0, 0, 0)
    """When they were last announced."""
    _drain_wanted: bool = False
    _events_lost: bool = False
    """An error has kept events from being sent: all are sent again."""
    _replay_at: float = 0.0
    """Not before, after one that has failed."""

    def send(self, message: EngineToWorker) -> None:
        """Send `message`, or drop it."""
        if self.control is not None and not self.control.send(message):
            logger.warning("worker service does not read; dropped %s", type(message).__name__)

    def announce(self) -> None:
        """What this engine is: at start, and when its weights or adapters have changed."""
        self.ready = msgspec.structs.replace(
            self.ready,
            geometry=self.engine.geometry,
            compat_hash=self.engine.compat_hash,
            adapters=self.engine.served_adapters,
            adapter_memory=self.engine.adapter_memory,
        )
        self._adapter_changes = self.engine.adapter_changes
        self.send(self.ready)

    def publish(self) -> None:
        """Once a turn: everything that is new."""
        self._pass_on_departure()
        events = self.engine.memory.cache.take_events()
        if self._events_lost:
            self._replay_lost()
        elif events:
            self._send_events(events)
        self._report_ended()
        if self.engine.adapter_changes != self._adapter_changes:
            self.announce()
        self.publish_stats()

    @recording
    def publish_stats(self) -> None:
        """If it is time for them."""
        now = time.monotonic()
        if now >= self._stats_at:
            self._stats_at = now + STATS_PERIOD
            # First: an engine whose statistics fail does not hang.
            self.watchdog.progressed()
            self.send(self.engine.stats())

    def replay_cache(self) -> None:
        """The whole prefix cache as events."""
        self._send_events(self.engine.memory.cache.snapshot_events())

    def _replay_lost(self) -> None:
        """Not in each turn: it takes time in proportion to the cache, and an error may stay."""
        now = time.monotonic()
        if now >= self._replay_at:
            self._replay_at = now + REPLAY_PERIOD
            self.replay_cache()

    def audit(self, nonce: int) -> None:
        """Answer an `Audit`."""
        report = self.engine.audit()
        self.send(
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
        """A node of this engine is to leave: the process that knows the fleet migrates requests first."""
        reason = self.engine.departure.reason
        if reason is not None and not self._drain_wanted:
            self._drain_wanted = True
            logger.info("requesting drain: %s", reason)
            self.send(DrainWanted(reason=reason))

    @recording
    def _report_ended(self) -> None:
        log = self.engine.scheduler.ended
        ended = log.take()
        unsent = len(ended)
        try:
            for start in range(0, len(ended), MAX_REPORTED):
                chunk = tuple(ended[start : start + MAX_REPORTED])
                message = EndedRequests(requests=chunk, lost=log.lost)
                sent = self.control is not None and self.control.send(message)
                unsent -= len(chunk)
                log.lost += 0 if sent else len(chunk)
        finally:
            log.lost += unsent

    def _send_events(self, events: Sequence[KvEvent]) -> None:
        self._events_lost = True
        self._send_numbered(events)

    @recording
    def _send_numbered(self, events: Sequence[KvEvent]) -> None:
        for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
            self._event_sequence += 1
            chunk = tuple(events[start : start + MAX_EVENTS_PER_BATCH])
            self.send(KvEventBatch(sequence=self._event_sequence, events=chunk))
        self._events_lost = False


MAX_NAMED_RELEASES = 16
"""Releases of refused gateways that the log names."""


@dataclass(slots=True)
class GatewayReleases:
    """Refuses requests of gateways whose release is outside the window, and logs each such release once."""

    _named: set[int] = field(default_factory=set)

    def refusal(self, message: GenerateRequest) -> OutputBatch | None:
        """The answer to a request that is refused; None for any other."""
        problem = skew(message.release)
        if not problem:
            return None
        if message.release not in self._named and len(self._named) < MAX_NAMED_RELEASES:
            self._named.add(message.release)
            logger.warning("requests of a gateway are refused: %s", problem)
        finish = error_finish(ReleaseSkewError(f"this worker refuses requests of the gateway: {problem}"))
        return OutputBatch(outputs=(TokenOutput(rid=message.rid, index=len(message.resume_ids), finish=finish),))


MAX_SLEEP = 0.05
"""Bounds how late a deadline or a lease is noticed; everything else is announced by a socket or the transport."""

RANKS_SLEEP = 0.002
"""While other ranks, which have no socket here, are about to report what this one has seen."""

ABORT_S = 1.0
"""How long the last requests may take to end."""


@dataclass(kw_only=True, slots=True)
class EngineLoop:
    """Owns the turns. `run` returns when the process should exit."""

    engine: Engine
    incarnation: str
    requests: Requests
    control: Control | None
    outbox: Outbox
    operations: Operations
    reports: Reports
    poller: Poller
    """Of all of their sockets and descriptors."""
    tokenizer: TokenizerBundle | None = None
    """Sent to gateways that request it."""
    _gateways: GatewayReleases = field(default_factory=GatewayReleases)
    _stopping: bool = False
    _at_rest: AtRest = field(default_factory=AtRest)
    _early: deque[tuple[bytes, EngineRequest]] = field(default_factory=deque)
    """Requests that came during a long step; handled at the next turn."""

    def stop(self) -> None:
        """Leave the loop at its next turn. Safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Raises `RankLostError` when a part of the engine is lost; its clients know by then."""
        self.engine.on_wait(self._answer_pings)
        self.reports.announce()
        try:
            self._turn_until_stopped()
            self._abort_everything()
        except RankLostError:
            self.engine.scheduler.report_failure(RankLostError("this worker lost a part of its model"))
            raise

    def _turn_until_stopped(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self.operations.close()

    def _turn(self) -> None:
        received = self._receive()
        worked = self.engine.step()
        self._abort_unreachable()
        self.operations.poll()
        self.reports.publish()
        self._at_rest.turn(worked=worked, now=time.monotonic())
        if not (received or worked):
            self.poller.wait(RANKS_SLEEP if self.engine.awaits_ranks else MAX_SLEEP)

    def _receive(self) -> bool:
        any_message = False
        while self._early:
            any_message = True
            self._handle_request(*self._early.popleft())
        for client, message in self.requests.receive():
            any_message = True
            self._handle_request(client, message)
        if self.control is not None:
            for order in self.control.receive():
                any_message = True
                self._handle_order(order)
        return any_message

    def _answer_pings(self) -> None:
        """During a long step: prove that this engine lives, and keep everything else for the next turn."""
        for client, message in self.requests.receive():
            if isinstance(message, Ping):
                self._handle_request(client, message)
            else:
                self._early.append((client, message))
        self.reports.publish_stats()

    def _handle_request(self, client: bytes, message: EngineRequest) -> None:
        match message:
            case GenerateRequest() if (refusal := self._gateways.refusal(message)) is not None:
                self.requests.send(client, refusal)
            case GenerateRequest():
                self.engine.add(message, client)
                self.requests.send(client, Taken(rid=message.rid))
            case AbortRequest():
                self.engine.abort(RequestId(message.rid))
            case CloseSession():
                self.engine.close_session(message.session, cache_salt=message.cache_salt)
            case Ping():
                self.requests.send(client, Pong(nonce=message.nonce, incarnation=self.incarnation))
            case TokenizerRequest():
                self.requests.send(client, tokenizer_part(self.tokenizer, message))

    def _handle_order(self, order: WorkerToEngine) -> None:
        match order:
            case Audit():
                self.reports.audit(order.nonce)
            case ReplayCache():
                self.reports.replay_cache()
            case PeerGone():
                self.engine.peer_gone(order.incarnation)
            case PeerEnded():
                self.engine.peer_ended(order.incarnation)
            case MeetPeers():
                self.engine.meet_peers(order.peers)
            case Drain():
                # A paused request could never finish.
                self.engine.resume()
                self.engine.drain()
            case Shutdown():
                self.stop()
            case _:
                self.operations.handle(order)

    def _abort_unreachable(self) -> None:
        """A gateway that died cannot abort its requests, so its worker does [dead-gateway-aborts]."""
        while self.outbox.unreachable:
            self.engine.abort_client(self.outbox.unreachable.pop())

    def _abort_everything(self) -> None:
        self.engine.abort_all()
        deadline = time.monotonic() + ABORT_S
        while not self.engine.idle and time.monotonic() < deadline:
            self.engine.step()
