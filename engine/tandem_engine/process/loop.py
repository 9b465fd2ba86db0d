"""The turns of an engine process: take in what has come, step, report, and sleep when there was nothing to do.

Until `stop`; then what is left is aborted, and its clients hear of it.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from tandem_engine.engine import Engine
from tandem_engine.errors import RankLostError
from tandem_engine.freed import AtRest
from tandem_engine.ipc.poller import Poller
from tandem_engine.messages.control import (
    Audit,
    Drain,
    MeetPeers,
    PeerEnded,
    PeerGone,
    ReplayCache,
    Shutdown,
    WorkerToEngine,
)
from tandem_engine.messages.outputs import Pong, Taken
from tandem_engine.messages.requests import AbortRequest, CloseSession, EngineRequest, GenerateRequest, Ping
from tandem_engine.names import RequestId
from tandem_engine.operations import Operations
from tandem_engine.process.channels import Control, Outbox, Requests
from tandem_engine.process.reports import Reports

LONGEST_SLEEP = 0.05
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
        self._at_rest.turn(worked=received or worked, now=time.monotonic())
        if not (received or worked):
            self.poller.wait(RANKS_SLEEP if self.engine.awaits_ranks else LONGEST_SLEEP)

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
            case GenerateRequest():
                self.engine.add(message, client)
                self.requests.send(client, Taken(rid=message.rid))
            case AbortRequest():
                self.engine.abort(RequestId(message.rid))
            case CloseSession():
                self.engine.close_session(message.session, cache_salt=message.cache_salt)
            case Ping():
                self.requests.send(client, Pong(nonce=message.nonce, incarnation=self.incarnation))

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
                # Whoever is paused could never finish.
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
