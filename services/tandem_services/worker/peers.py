"""Tracks the peers of this worker: which ones its engine may exchange KV with, and which have ended.

    PeerWatch       which incarnations ended, from the claims in the registry
    PeerAnnouncements   names to the engine the peers of complementary role, equal `compat_hash` and a release of the
                    window. When the fleet or this worker's KV format changes, or after `REFRESH_S`, it reads the
                    registry after a random delay, so that the workers of a rollout do not read at once
    PeerChecks      pings peers that the registry lists no longer, and reports those that ended
    PeerExits       whether the process of a fenced peer has exited
    WarmLinks       whether the links to the first peers are measured; until then, at most for
                    `timeout_s`, the pod is not ready

A newer incarnation with a signed claim fences the older one of the same worker at once. An incarnation that is only
missing in the registry may have left, died, lost Redis or been lost by Redis. `PeerChecks` looks for a signed verdict,
then pings it over an authenticated socket. If it answers, it stays a peer. If not, the engine drops its agents,
mappings and grants, and a signed verdict is written, which ends the incarnation when it reaches Redis again. After a
wipe (new epoch) peers get one fencing period to return. Without Redis nothing is due; verdicts are written later.

A fenced process may be stopped in the middle of a KV write and continue it later, so silence never frees its granted
pages. Only proof of its exit does. Nothing is sent to it:

    fenced ──▶ connect ─┬─ refused: its kernel has no such process ──▶ exited
                ▲       ├─ no answer for `UNREACHABLE_S` ────────────▶ exited: machine or network is lost
                │       └─ connected ─▶ wait for the end of the connection ─┐
                └───────────────────────────────────────────────────────────┘
    a later incarnation is registered at its endpoint ──▶ exited: a socket has one owner

A link that fails its test does not delay readiness: it is reported as slow or broken, and requests avoid it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import Protocol

from tandem_engine.base.addresses import Address
from tandem_engine.base.clock import Clock
from tandem_engine.base.release import skew
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.control import MAX_LINKS, MeetPeers, PeerEnded
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.stats import LinkReport
from tandem_services.common.engine_ping import answers
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.decision import WorkerView
from tandem_services.router.deployment import supersedes
from tandem_services.router.keys import FENCE_AFTER_MS, worker_id_of
from tandem_services.router.views.fleet_reader import Snapshots

ASK_AGAIN_S = 5.0
"""A peer that answers and is not registered is probed again after this long."""


@dataclass(kw_only=True, slots=True)
class PeerWatch:
    """Remembers the last list. Not thread-safe."""

    clock: Clock
    own: str
    _epoch: str = ""
    _known: frozenset[str] = frozenset()
    _missing: dict[str, float] = field(default_factory=dict)
    """Incarnations that are listed no longer, and suspects; and when they are to be probed."""

    def update(self, epoch: str, members: frozenset[str] | None) -> frozenset[str]:
        """Incarnations that a newer one has superseded. `members` is None when nothing has changed."""
        members = self._known if members is None else members - {self.own}
        wiped = bool(self._epoch) and epoch != self._epoch
        self._expect(self._known - members, within_s=FENCE_AFTER_MS / 1000 if wiped else 0.0)
        self._epoch, self._known = epoch, members
        self._missing = {missing: at for missing, at in self._missing.items() if missing not in members}
        newest = {worker_id_of(member): member for member in members}
        superseded = {
            missing for missing in self._missing if supersedes(newest.get(worker_id_of(missing), ""), missing)
        }
        for incarnation in superseded:
            self.forget(incarnation)
        return frozenset(superseded)

    def suspect(self, silent: Iterable[str]) -> None:
        """The engine waits for these incarnations without an answer."""
        self._expect((each for each in silent if each not in self._known), within_s=FENCE_AFTER_MS / 1000)

    def due(self) -> frozenset[str]:
        """Missing ones that are to be probed now."""
        now = self.clock.now()
        return frozenset(missing for missing, at in self._missing.items() if now >= at)

    def answered(self, incarnation: str) -> None:
        """It is alive, whatever the registry contains."""
        if incarnation in self._missing:
            self._missing[incarnation] = self.clock.now() + ASK_AGAIN_S

    def forget(self, incarnation: str) -> None:
        """It is gone."""
        self._missing.pop(incarnation, None)

    def _expect(self, incarnations: Iterable[str], *, within_s: float) -> None:
        for incarnation in incarnations:
            self._missing.setdefault(incarnation, self.clock.now() + within_s)


logger = logging.getLogger(__name__)

REFRESH_S = 30.0
"""Changes that the registry's generation does not cover, such as a role, are noticed within this time."""

WITHIN_S = 1.0
"""Spread of the answers to one change."""


@dataclass(kw_only=True, slots=True)
class PeerAnnouncements:
    """Runs for as long as the engine does."""

    fleet: Snapshots
    own: Callable[[], WorkerView]
    order: Callable[[MeetPeers], Awaitable[None]]
    observe: Callable[[list[WorkerView]], None] = lambda _: None
    """Called with the registered members, at each check."""
    random: Random = field(default_factory=Random)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    named: tuple[Peer, ...] | None = None
    """The peers that were last sent to the engine; None: the registry has not been read yet."""

    def fleet_changed(self) -> None:
        """Look again soon."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            await self.introduce()
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self.random.uniform(0.0, WITHIN_S))

    async def introduce(self) -> None:
        """Name the peers of now, unless they are those of before."""
        try:
            snapshot = await self.fleet.snapshot()
        except RedisUnavailableError:
            return
        views = [record.view for record in snapshot.workers]
        self.observe(views)
        peers = peers_to_connect(self.own(), views)
        changed = peers != (self.named or ())
        self.named = peers
        if changed:
            await self.order(MeetPeers(peers=peers))


def peers_to_connect(own: WorkerView, others: Iterable[WorkerView]) -> tuple[Peer, ...]:
    """At most `MAX_LINKS` workers that KV may go to or come from; in a larger fleet another part for each worker."""
    views = [other for other in others if other.worker_id != own.worker_id and _complementary(own, other)]
    views.sort(key=lambda view: _affinity(own.incarnation, view.incarnation))
    return tuple(
        Peer(
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            endpoint=view.peer_endpoint,
            compat_hash=view.compat_hash,
            release=view.release,
        )
        for view in views[:MAX_LINKS]
    )


def _complementary(own: WorkerView, other: WorkerView) -> bool:
    alike = own.role is other.role and own.role is not Role.BOTH
    same = own.compat_hash == other.compat_hash and own.model == other.model
    return same and not alike and not skew(other.release)


def _affinity(own: str, other: str) -> bytes:
    return blake2b(f"{own} {other}".encode(), digest_size=8).digest()


PROBE_S = 1.0

UNREACHABLE_S = 3.0
"""A connection without answer or refusal for so long leads to no machine."""

RECHECK_S = 5.0
"""Between checks of the registry while a connection is open."""

PAUSE_S = 0.5
"""Between connection attempts."""


class _ProbeResult(Enum):
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LIVED = "lived"
    """It was connected, for a while at least."""


@dataclass(kw_only=True, slots=True)
class PeerExits:
    """Of one worker. Belongs to its event loop."""

    fleet: Snapshots
    order: Callable[[PeerEnded], Awaitable[None]]
    clock: Clock
    recheck_s: float = RECHECK_S
    _followed: set[str] = field(default_factory=set)

    def unfollowed(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of `peers` whose exit is not tracked yet."""
        return [peer for peer in peers if peer.incarnation not in self._followed]

    async def follow(self, peer: Peer) -> None:
        """Wait until its process has exited, and notify the engine."""
        self._followed.add(peer.incarnation)
        try:
            await self._until_ended(peer)
            logger.info("process of %s has exited", peer.incarnation)
            await self.order(PeerEnded(incarnation=peer.incarnation))
        finally:
            self._followed.discard(peer.incarnation)

    async def _until_ended(self, peer: Peer) -> None:
        silent_since: float | None = None
        while not await self._replaced(peer):
            line = await self._probe(peer)
            if line is _ProbeResult.REFUSED:
                return
            if line is _ProbeResult.LIVED:
                silent_since = None
            elif silent_since is None:
                silent_since = self.clock.now() - PROBE_S
            elif self.clock.now() - silent_since >= UNREACHABLE_S:
                return
            await asyncio.sleep(PAUSE_S)

    async def _replaced(self, peer: Peer) -> bool:
        """Whether a later incarnation has its endpoint. The row of an earlier one, written again, proves nothing."""
        try:
            snapshot = await self.fleet.snapshot()
        except RedisUnavailableError:
            return False
        views = (record.view for record in snapshot.workers)
        return any(view.peer_endpoint == peer.endpoint and _later(view.incarnation, peer.incarnation) for view in views)

    async def _probe(self, peer: Peer) -> _ProbeResult:
        try:
            address = Address.of_endpoint(peer.endpoint)
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except ConnectionRefusedError:
            return _ProbeResult.REFUSED
        except (OSError, ValueError):  # a gateway named the endpoint, and it may be none
            return _ProbeResult.UNREACHABLE
        try:
            await self._stay(reader, peer)
        finally:
            writer.close()
        return _ProbeResult.LIVED

    async def _stay(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        """Until the connection ends, or another incarnation has the endpoint. Received bytes are ignored."""
        while not await self._replaced(peer):
            try:
                async with asyncio.timeout(self.recheck_s):
                    if not await reader.read(4096):
                        return
            except TimeoutError:
                continue
            except OSError:
                return


def _later(incarnation: str, other: str) -> bool:
    """Whether `incarnation`, of whichever worker, was started after `other`: numbers are microseconds of the start."""
    number, other_number = (name.rpartition("@")[2] for name in (incarnation, other))
    return number.isdigit() and other_number.isdigit() and int(number) > int(other_number)


ANSWER_S = 2.0
"""As long as connections between processes may be silent (`HEARTBEAT_TIMEOUT_MS` of `tandem_engine.ipc.channels`)."""


class Verdicts(Protocol):
    """The registry, as far as it stores verdicts."""

    async def fence(self, incarnation: str, *, by: str) -> None: ...


@dataclass(kw_only=True, slots=True)
class PeerChecks:
    """Of one worker. Belongs to its event loop."""

    registry: Verdicts
    fleet: Snapshots
    watch: PeerWatch
    context: IpcContext
    gone: Callable[[str], None]
    answer_s: float = ANSWER_S
    _endpoints: dict[str, str] = field(default_factory=dict)
    """Of the engines of peers, from signed rows."""
    _asked: set[str] = field(default_factory=set)
    _unwritten: set[str] = field(default_factory=set)
    """Found dead, and Redis has not taken the verdict yet."""

    def observe(self, views: Iterable[WorkerView]) -> None:
        """Endpoints of peers, from a snapshot."""
        self._endpoints |= {view.incarnation: view.request_endpoint for view in views}

    @property
    def pending(self) -> bool:
        """Whether there is anything to ask or to write."""
        return bool(self._unwritten or self.watch.due() - self._asked)

    async def run_due(self) -> None:
        """Probe all due peers that are not being probed. Takes at most `answer_s`, plus the time of Redis."""
        due = self.watch.due() - self._asked
        self._asked |= due
        try:
            await self._write()
            await self._ask(due)
        except RedisUnavailableError:
            return
        finally:
            self._asked -= due

    async def _ask(self, due: frozenset[str]) -> None:
        snapshot = await self.fleet.snapshot(missing=sorted(due))
        self.observe(record.view for record in snapshot.workers)
        for incarnation in sorted(due & snapshot.fenced):
            self._drop(incarnation)
        asked = sorted(due - snapshot.fenced)
        for incarnation, lives in zip(asked, await asyncio.gather(*map(self._lives, asked)), strict=True):
            if lives:
                self.watch.answered(incarnation)
            elif incarnation in self.watch.due():  # not registered again in the meantime
                self._drop(incarnation)
                self._unwritten.add(incarnation)
        await self._write()

    async def _lives(self, incarnation: str) -> bool:
        """Not, where it never had a row: it lived between two checks of the registry."""
        endpoint = self._endpoints.get(incarnation)
        return endpoint is not None and await answers(self.context, endpoint, incarnation, within_s=self.answer_s)

    def _drop(self, incarnation: str) -> None:
        self.watch.forget(incarnation)
        self._endpoints.pop(incarnation, None)
        self.gone(incarnation)

    async def _write(self) -> None:
        for incarnation in sorted(self._unwritten):
            await self.registry.fence(incarnation, by=self.watch.own)
            self._unwritten.discard(incarnation)


@dataclass(kw_only=True, slots=True)
class WarmLinks:
    """A readiness check (`common.health.Check`)."""

    clock: Clock
    timeout_s: float
    """From the first question on; 0: nothing is waited for."""
    named: Callable[[], tuple[Peer, ...] | None]
    """The peers that were sent to the engine; None: the registry was not read yet."""
    links: Callable[[], tuple[LinkReport, ...]]
    _asked_at: float | None = None
    _warm: bool = False

    def check(self) -> str | None:
        """What is missing."""
        if self._warm:
            return None
        now = self.clock.now()
        self._asked_at = now if self._asked_at is None else self._asked_at
        missing = self._missing()
        self._warm = missing is None or now - self._asked_at >= self.timeout_s
        return None if self._warm else missing

    def _missing(self) -> str | None:
        peers = self.named()
        if peers is None:
            return "not introduced to its peers yet"
        tested = {link.peer for link in self.links() if link.bytes_per_s > 0 or link.problem or link.broken}
        untested = [peer.worker_id for peer in peers if peer.incarnation not in tested]
        return f"{len(untested)} of {len(peers)} links are not tested yet" if untested else None
