"""Keeps this worker's lease: one heartbeat a second, and at once when its state changes.

Each heartbeat carries the whole description, so the first registers and any one registers again after Redis
lost its data. The answer is worth as much as the heartbeat: it may say that the lease is lost for good, that
peers are gone, or that the index has to be published again.

A worker ends for a verdict that a process of its deployment has signed, and for nothing else that Redis says. A forged
one is named in the next heartbeat, which takes it away.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.deployment import supersedes
from tandem_services.router.keys import HEARTBEAT_S, MAX_WORKERS
from tandem_services.router.registry import HeartbeatReply, LeaseStatus, Registry, WorkerRecord, WorkerState
from tandem_services.worker.index_feed import IndexFeed
from tandem_services.worker.peers import PeerWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequences:
    """What the answers of the registry set off."""

    peer_gone: Callable[[str], None]
    fleet_changed: Callable[[], None]
    """Somebody came or went."""
    peers_missing: Callable[[], None]
    """Peers may be there that are to be asked whether they live."""
    lost: Callable[[str], None]
    """The lease is lost for good; the sentence says why. The process has to end."""


@dataclass(kw_only=True, slots=True)
class Registration:
    """The heart of one incarnation."""

    registry: Registry
    describe: Callable[[], WorkerRecord]
    report_age_s: Callable[[], float]
    silent_peers: Callable[[], tuple[str, ...]]
    """Incarnations that the engine waits for in vain."""
    feed: IndexFeed
    peers: PeerWatch
    clock: Clock
    consequences: Consequences
    registered: bool = False
    """At least one heartbeat was accepted since start."""
    offered: bool = False
    """The last heartbeat that was accepted said that new work is welcome."""
    _generation: int = 0
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
        try:
            reply = await self.registry.heartbeat(
                record,
                known_generation=self._generation,
                report_age_s=self.report_age_s(),
                forged=self._forged,
            )
        except RedisUnavailableError:
            return
        self.offered = reply.status is LeaseStatus.RENEWED and record.state is WorkerState.READY
        match reply.status:
            case LeaseStatus.RENEWED:
                self._renewed(reply, acknowledged)
            case LeaseStatus.FENCED:
                self._fenced(reply)
            case LeaseStatus.FULL:
                self._note_full()

    async def leave(self) -> None:
        """Deregister, so that nobody waits for the lease to end."""
        try:
            await self.registry.deregister(self.peers.own)
        except RedisUnavailableError:
            logger.warning("cannot deregister %s; its lease expires", self.peers.own)

    def _renewed(self, reply: HeartbeatReply, acknowledged: int) -> None:
        if not self.registered:
            logger.info("registered %s", self.peers.own)
        self.registered = True
        self._forged, self._full = "", False
        self._generation = reply.generation
        members = None if reply.members is None else frozenset(reply.members)
        if members is not None:
            self.consequences.fleet_changed()
        self.peers.suspect(self.silent_peers())
        for incarnation in sorted(self.peers.update(reply.epoch, members)):
            self.consequences.peer_gone(incarnation)
        self.consequences.peers_missing()
        self.feed.check(reply.cursor, acknowledged)

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
