"""The engine as a process: sockets in, engine step, outputs out, until told to stop.

Start   load model → build engine → bind sockets → self-test → `EngineReady` to the worker service
Turn    gateways' requests → worker's orders → one scheduler step → outputs, KV events, stats
Idle    sleep on all sockets and the transport's descriptor, also while requests wait; nothing spins
Stop    SIGTERM, `Shutdown`, or the worker service gone: abort what is left, tell every client, close

Everything runs on one thread, the scheduler's; the forward and NIXL have threads of their own.
"""

import gc
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.errors import EngineError, RankLostError
from tandem_engine.executor.self_test import SelfTestReport
from tandem_engine.freed import AtRest, give_back
from tandem_engine.ipc.channels import (
    IpcContext,
    PairChannel,
    RouterChannel,
)
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.ipc.parent import die_with_parent
from tandem_engine.ipc.poller import Poller
from tandem_engine.launch import launched_engine
from tandem_engine.messages.control import (
    Audit,
    AuditReport,
    Drain,
    DrainWanted,
    EngineFailed,
    EngineReady,
    EngineToWorker,
    MeetPeers,
    PeerEnded,
    PeerGone,
    ReplayCache,
    Shutdown,
    WorkerToEngine,
)
from tandem_engine.messages.ended_requests import MAX_REPORTED, EndedRequests
from tandem_engine.messages.kv_events import KvEvent, KvEventBatch
from tandem_engine.messages.outputs import EngineReply, OutputBatch, Pong, Taken, TokenOutput
from tandem_engine.messages.requests import AbortRequest, CloseSession, EngineRequest, GenerateRequest, Ping
from tandem_engine.names import RequestId
from tandem_engine.operations import Operations
from tandem_engine.parallel.nodes.access import NodeAccess
from tandem_engine.watchdog import Watchdog, describe_scheduler

log = logging.getLogger(__name__)

STATS_PERIOD = 0.5
LONGEST_SLEEP = 0.05
"""Bounds how late a deadline or a lease is noticed; everything else is announced by a socket or the transport."""
RANKS_SLEEP = 0.002
"""While other ranks, which have no socket here, are about to report what this one has seen."""
MAX_EVENTS_PER_BATCH = 256
LAST_WORDS_S = 1.0
"""How long outputs may take to leave when the process ends."""
UNEXPECTED_ERROR = 70
"""Exit status, EX_SOFTWARE of sysexits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessConfig:
    """Where an engine process listens and whom it serves."""

    engine: EngineConfig
    worker_id: str
    incarnation: str
    host: str
    request_port: int
    peer_port: int
    control: str | None
    """Endpoint of the worker service; None runs without one."""
    report_ended: bool = False
    """Tell it when traced requests were computed."""
    curve_keys: Path | None


@dataclass(kw_only=True, slots=True)
class Outbox:
    """Sends outputs to gateways. One that is gone gets nothing more and its requests are aborted."""

    channel: "RouterChannel[EngineRequest, EngineReply] | None" = None
    unreachable: set[bytes] = field(default_factory=set)

    def __call__(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        if self.channel is not None and not self.channel.send(client, OutputBatch(outputs=outputs)):
            self.unreachable.add(client)


class EngineProcess:
    """Owns the loop. Built by `serve`; `run` returns when the process should exit."""

    def __init__(
        self,
        *,
        config: ProcessConfig,
        engine: Engine,
        requests: "RouterChannel[EngineRequest, EngineReply]",
        control: "PairChannel[WorkerToEngine, EngineToWorker] | None",
        outbox: Outbox,
        watchdog: Watchdog,
        ready: EngineReady,
    ) -> None:
        self._config = config
        self._engine = engine
        self._requests = requests
        self._control = control
        self._outbox = outbox
        self._watchdog = watchdog
        self._ready = ready
        operation = config.engine.operation
        self._operations = Operations(
            engine=engine,
            profiler=engine.profiler(Path(operation.torch_profiler_dir) if operation.torch_profiler_dir else None),
            answer=self._tell,
            model_replaced=self._announce,
        )
        self._event_sequence = 0
        self._stats_at = 0.0
        self._stopping = False
        self._drain_wanted = False
        self._at_rest = AtRest()
        self._early: deque[tuple[bytes, EngineRequest]] = deque()
        """Requests that came during a long step; handled at the next turn."""
        engine.scheduler.ended.wanted = config.report_ended and control is not None
        engine.on_wait(self._answer_pings)
        engine.scheduler.on_hang(watchdog.step_hangs)
        sockets = [requests.socket, *engine.sockets()]
        sockets += [control.socket] if control is not None else []
        self._poller = Poller(sockets, engine.descriptors())

    def stop(self) -> None:
        """Leave the loop at its next turn. Safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Raises `RankLostError` when a part of the engine is lost; its clients know by then."""
        self._announce()
        try:
            self._turn_until_stopped()
            self._abort_everything()
        except RankLostError:
            self._engine.scheduler.report_failure(RankLostError("this worker lost a part of its model"))
            raise

    def _turn_until_stopped(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._operations.close()

    def _turn(self) -> None:
        received = self._receive()
        worked = self._engine.step()
        self._abort_unreachable()
        self._operations.poll()
        self._pass_on_departure()
        self._publish()
        self._at_rest.turn(worked=received or worked, now=time.monotonic())
        if not (received or worked):
            self._poller.wait(RANKS_SLEEP if self._engine.awaits_ranks else LONGEST_SLEEP)

    def _receive(self) -> bool:
        any_message = False
        while self._early:
            any_message = True
            self._handle_request(*self._early.popleft())
        for client, message in self._requests.receive():
            any_message = True
            self._handle_request(client, message)
        if self._control is not None:
            for order in self._control.receive():
                any_message = True
                self._handle_order(order)
        return any_message

    def _answer_pings(self) -> None:
        """During a long step: prove that this engine lives, and keep everything else for the next turn."""
        for client, message in self._requests.receive():
            if isinstance(message, Ping):
                self._handle_request(client, message)
            else:
                self._early.append((client, message))
        self._publish_stats()

    def _handle_request(self, client: bytes, message: EngineRequest) -> None:
        match message:
            case GenerateRequest():
                self._engine.add(message, client)
                self._requests.send(client, Taken(rid=message.rid))
            case AbortRequest():
                self._engine.abort(RequestId(message.rid))
            case CloseSession():
                self._engine.close_session(message.session, cache_salt=message.cache_salt)
            case Ping():
                self._requests.send(client, Pong(nonce=message.nonce, incarnation=self._config.incarnation))

    def _handle_order(self, order: WorkerToEngine) -> None:
        match order:
            case Audit():
                self._report_audit(order.nonce)
            case ReplayCache():
                self._send_events(self._engine.memory.cache.snapshot_events())
            case PeerGone():
                self._engine.peer_gone(order.incarnation)
            case PeerEnded():
                self._engine.peer_ended(order.incarnation)
            case MeetPeers():
                self._engine.meet_peers(order.peers)
            case Drain():
                # Whoever is paused could never finish.
                self._engine.resume()
                self._engine.drain()
            case Shutdown():
                self.stop()
            case _:
                self._operations.handle(order)

    def _report_audit(self, nonce: int) -> None:
        report = self._engine.audit()
        self._tell(
            AuditReport(
                nonce=nonce,
                problems=report.problems,
                idle=self._engine.scheduler.idle,
                free_pages=report.free,
                tree_pages=report.tree,
                private_pages=report.private,
                held_pages=report.held,
            )
        )

    def _abort_unreachable(self) -> None:
        """A gateway that died cannot abort its requests, so its worker does (RELIABILITY B3 14)."""
        while self._outbox.unreachable:
            self._engine.abort_client(self._outbox.unreachable.pop())

    def _pass_on_departure(self) -> None:
        """A node of this engine is to leave: whoever knows the fleet has requests move before it does."""
        reason = self._engine.departure.reason
        if reason is not None and not self._drain_wanted:
            self._drain_wanted = True
            log.info("asking to be drained: %s", reason)
            self._tell(DrainWanted(reason=reason))

    def _publish(self) -> None:
        events = self._engine.memory.cache.take_events()
        if events:
            self._send_events(events)
        self._report_ended()
        self._publish_stats()

    def _report_ended(self) -> None:
        log = self._engine.scheduler.ended
        ended = log.take()
        for start in range(0, len(ended), MAX_REPORTED):
            chunk = tuple(ended[start : start + MAX_REPORTED])
            message = EndedRequests(requests=chunk, lost=log.lost)
            if self._control is None or not self._control.send(message):
                log.lost += len(chunk)

    def _publish_stats(self) -> None:
        now = time.monotonic()
        if now >= self._stats_at:
            self._stats_at = now + STATS_PERIOD
            self._tell(self._engine.stats())
            self._watchdog.progressed()

    def _announce(self) -> None:
        """Tell the worker service what this engine is: at start, and when its weights were replaced."""
        self._ready = msgspec.structs.replace(
            self._ready, geometry=self._engine.geometry, compat_hash=self._engine.compat_hash
        )
        self._tell(self._ready)

    def _send_events(self, events: Sequence[KvEvent]) -> None:
        for start in range(0, len(events), MAX_EVENTS_PER_BATCH):
            self._event_sequence += 1
            chunk = tuple(events[start : start + MAX_EVENTS_PER_BATCH])
            self._tell(KvEventBatch(sequence=self._event_sequence, events=chunk))

    def _tell(self, message: EngineToWorker) -> None:
        # A full queue drops the message: the worker service sees the gap in sequence and asks for a replay.
        if self._control is not None and not self._control.send(message):
            log.warning("the worker service does not read; dropped one %s", type(message).__name__)

    def _abort_everything(self) -> None:
        self._engine.abort_all()
        deadline = time.monotonic() + 1.0
        while not self._engine.idle and time.monotonic() < deadline:
            self._engine.step()


def serve(config: ProcessConfig) -> int:
    """Run one engine until it is told to stop; returns the exit status."""
    die_with_parent()
    keys = KeyPair.load(config.curve_keys) if config.curve_keys is not None else None
    context = IpcContext(keys)
    control = _open_control(context, config)
    try:
        _serve(config, context, control)
    except EngineError as error:
        log.error("%s", error)
        if control is not None:
            control.send(EngineFailed(message=str(error), code=error.code))
            control.drain(seconds=1.0)
        return 3
    except Exception:
        # A bug: what it left behind cannot be trusted, so the worker service starts the engine anew.
        log.exception("the engine stops on an unexpected error")
        return UNEXPECTED_ERROR
    finally:
        if control is not None:
            control.close()
        context.close()
    return 0


def _serve(
    config: ProcessConfig, context: IpcContext, control: "PairChannel[WorkerToEngine, EngineToWorker] | None"
) -> None:
    outbox = Outbox()
    port = EnginePort(
        worker_id=config.worker_id,
        incarnation=config.incarnation,
        context=context,
        host=config.host,
        peer_port=config.peer_port,
    )
    nodes = NodeAccess(host=config.host, curve_keys=config.curve_keys)
    with launched_engine(config.engine, progress=True, self_test=True, sink=outbox, port=port, nodes=nodes) as engine:
        test = engine.self_test()
        # What is there now stays. Else every full collection walks all of torch: measured, 0.2 s without a token.
        gc.collect()
        gc.freeze()
        give_back()
        requests: RouterChannel[EngineRequest, EngineReply] = RouterChannel(
            context, config.host, config.request_port, inbound=EngineRequest, outbound=EngineReply
        )
        outbox.channel = requests
        watchdog = Watchdog(
            timeout=config.engine.scheduler.watchdog_timeout,
            folder=Path(folder) if (folder := config.engine.operation.crash_dump_folder) else None,
            name=config.incarnation,
            describe=lambda: describe_scheduler(engine.scheduler),
        )
        process = EngineProcess(
            config=config,
            engine=engine,
            requests=requests,
            control=control,
            outbox=outbox,
            watchdog=watchdog,
            ready=_ready(config, engine, requests.endpoint, test),
        )
        _stop_on_signal(process)
        log.info(
            "engine %s serves %s on %s (peers %s), %d pages of %d tokens, prefill %.0f tokens/s",
            config.incarnation,
            config.engine.model_path,
            requests.endpoint,
            engine.peer_endpoint,
            engine.total_pages,
            engine.geometry.page_size,
            test.prefill_tokens_per_s,
        )
        try:
            process.run()
        finally:
            watchdog.close()
            requests.drain(LAST_WORDS_S)


def _ready(config: ProcessConfig, engine: Engine, request_endpoint: str, test: SelfTestReport) -> EngineReady:
    return EngineReady(
        incarnation=config.incarnation,
        request_endpoint=request_endpoint,
        peer_endpoint=engine.peer_endpoint,
        geometry=engine.geometry,
        compat_hash=engine.compat_hash,
        context_length=engine.scheduler.max_request_tokens,
        max_running_requests=engine.scheduler_config.max_running_requests,
        total_pages=engine.total_pages,
        prefill_tokens_per_s=test.prefill_tokens_per_s,
        decode_step_s=test.decode_step_s,
        transport=engine.transport_name,
    )


def _open_control(context: IpcContext, config: ProcessConfig) -> "PairChannel[WorkerToEngine, EngineToWorker] | None":
    if config.control is None:
        return None
    return PairChannel(context, config.control, inbound=WorkerToEngine, outbound=EngineToWorker)


def _stop_on_signal(process: EngineProcess) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        process.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
