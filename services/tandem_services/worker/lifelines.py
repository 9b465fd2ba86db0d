"""Whether the process of a fenced peer has ended, which it is not asked: it may be stopped in the middle of a write.

A process that is stopped says nothing for as long as it is, and then goes on where it was: with copying KV into pages
that it was granted, if that is where it was. So silence, however long, does not free these pages. That its kernel
refuses connections to its socket does, for then the process is gone.

    fenced ──▶ knock ─┬─ refused ──────────────────────────────▶ ended
                ▲     ├─ no answer, for `UNREACHABLE_S` ────────▶ ended: its machine is gone, or what led to it
                │     └─ connected ─▶ wait for the end of the line ─┐
                └───────────────────────────────────────────────────┘
    a later incarnation is registered at its endpoint ─────────▶ ended: a socket has one owner

Nothing is sent. A stopped process is waited for until it is killed, as Kubernetes does when its probes fail, or goes on
and ends by itself, as the fenced do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tandem_engine.addresses import Address
from tandem_engine.clock import Clock
from tandem_engine.messages.control import PeerEnded
from tandem_engine.messages.requests import Peer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.registry import FleetSnapshot

logger = logging.getLogger(__name__)

KNOCK_S = 1.0
UNREACHABLE_S = 3.0
"""Connections that nobody answers or refuses for so long end at no machine."""
RECHECK_S = 5.0
"""Between looks at the registry while a line is open."""
PAUSE_S = 0.5
"""Between knocks."""


class _Line(Enum):
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LIVED = "lived"
    """It was connected, for a while at least."""


class Snapshots(Protocol):
    """The registry, as far as it tells who listens where."""

    async def snapshot(self) -> FleetSnapshot: ...


@dataclass(kw_only=True, slots=True)
class Lifelines:
    """Of one worker. Belongs to its event loop."""

    registry: Snapshots
    order: Callable[[PeerEnded], Awaitable[None]]
    clock: Clock
    recheck_s: float = RECHECK_S
    _followed: set[str] = field(default_factory=set)

    def unfollowed(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of `peers` whose end nobody waits for yet."""
        return [peer for peer in peers if peer.incarnation not in self._followed]

    async def follow(self, peer: Peer) -> None:
        """Wait until its process has ended, and tell the engine."""
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
            line = await self._knock(peer)
            if line is _Line.REFUSED:
                return
            if line is _Line.LIVED:
                silent_since = None
            elif silent_since is None:
                silent_since = self.clock.now() - KNOCK_S
            elif self.clock.now() - silent_since >= UNREACHABLE_S:
                return
            await asyncio.sleep(PAUSE_S)

    async def _replaced(self, peer: Peer) -> bool:
        """Whether a later incarnation has its endpoint. The row of an earlier one, written again, proves nothing."""
        try:
            snapshot = await self.registry.snapshot()
        except RedisUnavailableError:
            return False
        views = (record.view for record in snapshot.workers)
        return any(view.peer_endpoint == peer.endpoint and _later(view.incarnation, peer.incarnation) for view in views)

    async def _knock(self, peer: Peer) -> _Line:
        try:
            address = Address.of_endpoint(peer.endpoint)
            async with asyncio.timeout(KNOCK_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except ConnectionRefusedError:
            return _Line.REFUSED
        except (OSError, ValueError):  # a gateway named the endpoint, and it may be none
            return _Line.UNREACHABLE
        try:
            await self._stay(reader, peer)
        finally:
            writer.close()
        return _Line.LIVED

    async def _stay(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        """Until the line ends, or another incarnation has the endpoint. What is said on it is nothing to us."""
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
