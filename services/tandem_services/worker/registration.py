"""Keeps this worker's lease: one heartbeat a second, and at once when its state changes.

Each heartbeat carries the whole description, so the first registers and any one registers again after Redis
lost its data. The answer is worth as much as the heartbeat: it may say that the lease is lost for good, that
peers are gone, or that the index has to be published again.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.keys import HEARTBEAT_S, LEASE_MS
from tandem_services.router.registry import HeartbeatReply, LeaseStatus, Registry, WorkerRecord, WorkerState
from tandem_services.worker.index_feed import IndexFeed
from tandem_services.worker.peers import PeerWatch

logger = logging.getLogger(__name__)

FOREIGN_PATIENCE_S = 2 * LEASE_MS / 1000
"""A deployment that was just replaced by this one holds the cluster name until its last lease is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequences:
    """What the answers of the registry set off."""

    peer_gone: Callable[[str], None]
    fleet_changed: Callable[[], None]
    """Somebody came or went."""
    lost: Callable[[str], None]
    """The lease is lost for good; the sentence says why. The process has to end."""


@dataclass(kw_only=True, slots=True)
class Registration:
    """The heart of one incarnation."""

    registry: Registry
    deployment: str
    """Digest of the deployment's key: tells two deployments with one cluster name apart."""
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
    _foreign_since: float | None = None
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
                deployment=self.deployment,
                known_generation=self._generation,
                report_age_s=self.report_age_s(),
            )
        except RedisUnavailableError:
            return
        self.offered = reply.status is LeaseStatus.RENEWED and record.state is WorkerState.READY
        match reply.status:
            case LeaseStatus.RENEWED:
                self._renewed(reply, acknowledged)
            case LeaseStatus.FENCED:
                self.consequences.lost(_fenced(self.peers.own, reply.by))
            case LeaseStatus.FOREIGN:
                self._foreign(reply.by)

    async def leave(self) -> None:
        """Deregister, so that nobody waits for the lease to end."""
        try:
            await self.registry.deregister(self.peers.own)
        except RedisUnavailableError:
            logger.warning("could not deregister %s; its lease ends by itself", self.peers.own)

    def _renewed(self, reply: HeartbeatReply, acknowledged: int) -> None:
        if not self.registered:
            logger.info("registered %s", self.peers.own)
        self.registered = True
        self._foreign_since = None
        self._generation = reply.generation
        members = None if reply.members is None else frozenset(reply.members)
        if members is not None:
            self.consequences.fleet_changed()
        self.peers.suspect(self.silent_peers())
        for incarnation in sorted(self.peers.update(reply.epoch, members)):
            self.consequences.peer_gone(incarnation)
        self.feed.check(reply.cursor, acknowledged)

    def _foreign(self, holder: str) -> None:
        now = self.clock.now()
        if self._foreign_since is None:
            self._foreign_since = now
        if now - self._foreign_since > FOREIGN_PATIENCE_S and not self.registered:
            self.consequences.lost(
                f"another deployment (key {holder[:16]}) uses this cluster name on this Redis; "
                "choose another --cluster, or give both the same --curve-keys"
            )


def _fenced(own: str, holder: str) -> str:
    if holder and holder != own:
        return f"{own} is fenced: {holder} is newer and has its name"
    return f"{own} is fenced: it was silent for too long; a new incarnation can take its place"
