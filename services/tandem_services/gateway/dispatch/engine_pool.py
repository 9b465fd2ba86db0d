"""The connections of a gateway to the engines of one fleet: opened on first use, and to few engines before.

    ahead     `AHEAD` workers are connected and pinged whether they get requests or not: all of a small fleet, random
              ones of a larger one, so that few gateways ping each worker
    unlisted  workers that Redis does not name are members while they answer, so all are connected and pinged, at
              most `UNLISTED_A_VIEW` more with each view
    used      any other worker is connected when a request is to go there (`prove`)
    closed    unused for `IDLE_S`, or those unused the longest when there are more than `MAX_OPEN`

A socket costs a handshake of half a millisecond, 36 KB, and ZeroMQ's heartbeats at both ends.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import WireError
from tandem_engine.ipc.channels import IpcContext
from tandem_services.gateway.dispatch.engine_client import (
    LOST,
    PROOF_S,
    UNREADABLE,
    EngineConnection,
    LivenessTiming,
    Revival,
)
from tandem_services.gateway.dispatch.reading_pace import ReadingPace
from tandem_services.router.decision import WorkerView
from tandem_services.router.deployment import supersedes

logger = logging.getLogger(__name__)

AHEAD = 24
"""A gateway that starts therefore makes no more handshakes than that at once, beside those that requests need."""

UNLISTED_A_VIEW = 256
"""An eighth of a second of handshakes."""

IDLE_S = 300.0

MAX_OPEN = 2048
"""Two descriptors each."""


@dataclass(kw_only=True, slots=True)
class EnginePool:
    """All connections to one fleet, by incarnation. Belongs to one event loop."""

    context: IpcContext
    timing: LivenessTiming
    on_dead: Callable[[str], None]
    """Called with the incarnation of every worker that was found dead."""
    revival: Revival
    clock: Clock
    random: Random = field(default_factory=Random)
    pace: ReadingPace = field(default_factory=ReadingPace)
    """Of the readers of all connections."""
    _connections: dict[str, EngineConnection] = field(default_factory=dict)
    _ahead: set[str] = field(default_factory=set)
    _silent: frozenset[str] = frozenset()
    _revived: dict[str, float] = field(default_factory=dict)
    """Incarnations that have answered over another connection, and have none here yet, and when that was."""
    _closed: bool = False

    def watch(self, workers: Iterable[WorkerView], *, unlisted: frozenset[str] = frozenset()) -> None:
        """These are the workers that the router may choose: be connected to some, and to no others for long.

        `unlisted`: those of them that have to prove to be members all the time.
        """
        if self._closed:
            return
        wanted = {worker.incarnation: worker for worker in workers}
        self._revived = {name: at for name, at in self._revived.items() if name in wanted}
        self._choose_ahead(wanted)
        watched = self._ahead | (unlisted & wanted.keys())
        self._close_unused(wanted.keys(), watched)
        for name in self._ahead - self._connections.keys():
            self._introduce(wanted[name], silent=name not in unlisted)
        for name in sorted(watched - self._connections.keys())[: min(UNLISTED_A_VIEW, self._left())]:
            self._introduce(wanted[name])
        for name, connection in self._connections.items():
            connection.watched = name in watched

    def watch_again(self, worker: WorkerView, *, unlisted: bool) -> None:
        """As `watch`, of one worker that was left out of the last call. Costs the same in any fleet."""
        name = worker.incarnation
        if not self._closed and len(self._ahead) < AHEAD:
            self._ahead.add(name)
        ahead = name in self._ahead
        if self._closed or not (ahead or unlisted):
            return
        if name not in self._connections and (ahead or self._left()):
            self._introduce(worker, silent=not unlisted)
        if name in self._connections:
            self._connections[name].watched = True

    @property
    def silent(self) -> frozenset[str]:
        """Incarnations that were asked and have not answered yet."""
        return self._silent

    def proven(self, incarnation: str) -> bool:
        """Whether this incarnation has answered a ping over an authenticated socket, and was not found silent or dead
        since."""
        connection = self._connections.get(incarnation)
        return incarnation in self._revived if connection is None else connection.proven

    def proven_now(self, incarnation: str) -> bool:
        """Whether `prove` would answer yes without a wait. Its connection counts as used then."""
        connection = self._connections.get(incarnation)
        return connection is not None and connection.proven_now()

    async def prove(self, worker: WorkerView, *, within_s: float) -> bool:
        """Whether `worker` answers within this time, or has lately."""
        connection = self._connections.get(worker.incarnation) or self._introduce(worker)
        return connection is not None and await connection.prove(within_s=within_s)

    def revived(self, incarnation: str) -> None:
        """It has answered over a separate connection."""
        self._revived[incarnation] = self.clock.now()

    def connect(self, worker: WorkerView, *, silent: bool = False) -> EngineConnection:
        """The connection to `worker`, opened when there is none; then no request should choose it until it has answered
        if it is `silent`. Raises `WireError` for an impossible endpoint, and without descriptors."""
        connection = self._connections.get(worker.incarnation)
        if connection is None:
            self._retire_older(worker)
            if not self._left():
                self._close_oldest()
            answered_at = self._revived.pop(worker.incarnation, float("-inf"))
            connection = self._open(worker, trusted=self.clock.now() - answered_at < PROOF_S, silent=silent)
        return connection

    def close(self) -> None:
        self._closed = True
        self.revival.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._silent = frozenset()

    def _choose_ahead(self, wanted: Mapping[str, WorkerView]) -> None:
        self._ahead &= wanted.keys()
        if lacking := min(AHEAD, len(wanted)) - len(self._ahead):
            others = [name for name in wanted if name not in self._ahead]
            self._ahead.update(self.random.sample(others, lacking))

    def _close_unused(self, wanted: Iterable[str], watched: set[str]) -> None:
        names, now = set(wanted), self.clock.now()
        idle = [each for name, each in self._connections.items() if each.idle and name not in watched]
        idle.sort(key=lambda connection: connection.used_at)
        too_many = len(self._connections) - MAX_OPEN
        for number, connection in enumerate(idle):
            gone = connection.worker.incarnation not in names
            if gone or number < too_many or now - connection.used_at > IDLE_S:
                self._drop(connection)

    def _close_oldest(self) -> None:
        """While Redis is away there is no new view, in which `watch` would close what is unused."""
        unused = [each for each in self._connections.values() if each.idle and not (each.watched or each.asked)]
        if unused:
            self._drop(min(unused, key=lambda connection: connection.used_at))

    def _left(self) -> int:
        return max(0, MAX_OPEN - len(self._connections))

    def _open(self, worker: WorkerView, *, trusted: bool, silent: bool = False) -> EngineConnection:
        connection = EngineConnection(
            worker,
            self.context,
            self.timing,
            self._bury,
            self.clock,
            trusted=trusted,
            silent=silent and not trusted,
            on_silence=self._note_silence,
            pace=self.pace,
        )
        self._connections[worker.incarnation] = connection
        self._note_silence(connection)
        connection.greet()
        return connection

    def _drop(self, connection: EngineConnection) -> None:
        connection.close()
        del self._connections[connection.worker.incarnation]
        self._silent -= {connection.worker.incarnation}

    def _note_silence(self, connection: EngineConnection) -> None:
        name = {connection.worker.incarnation}
        self._silent = self._silent | name if connection.silent else self._silent - name

    def _introduce(self, worker: WorkerView, *, silent: bool = False) -> EngineConnection | None:
        """As `connect`; None where that is not possible."""
        try:
            return self.connect(worker, silent=silent)
        except WireError as error:
            logger.warning(
                "cannot connect to a worker", extra={"fields": {"worker": worker.incarnation, "error": str(error)}}
            )
            self.on_dead(worker.incarnation)
            return None

    def _retire_older(self, worker: WorkerView) -> None:
        for connection in list(self._connections.values()):
            if supersedes(worker.incarnation, connection.worker.incarnation) and connection.idle:
                self._drop(connection)

    def _bury(self, connection: EngineConnection, reason: str) -> None:
        incarnation = connection.worker.incarnation
        self._connections.pop(incarnation, None)
        self._silent -= {incarnation}
        if connection.idle and connection.answered and reason == LOST:
            logger.info("connecting again", extra={"fields": {"worker": incarnation, "reason": reason}})
            another = self._open(connection.worker, trusted=connection.proven_before and connection.received_lately)
            another.watched = connection.watched
            return
        self.on_dead(incarnation)
        if reason != UNREADABLE:
            self.revival.ask(connection.worker)
        logger.warning("worker lost", extra={"fields": {"worker": incarnation, "reason": reason}})
