"""Tells the engine which peers it may exchange KV with, so that it gets to know and measures the links to them.

1. The fleet has changed, this worker's KV has another shape, or `REFRESH_S` have passed
2. after a random while, so that a rollout's workers do not all ask at once, the registry is read
3. the peers of complementary role and equal `compat_hash` are named to the engine, when they are others than before

Redis away: nothing is lost, the next round names them. What is gone is told elsewhere, at once (`registration`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from tandem_engine.config import Role
from tandem_engine.messages.control import MAX_LINKS, MeetPeers
from tandem_engine.messages.requests import Peer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.choice import WorkerView
from tandem_services.router.registry import Registry

logger = logging.getLogger(__name__)

REFRESH_S = 30.0
"""Changes that the registry's generation does not tell, such as a role, are noticed within this time."""
WITHIN_S = 1.0
"""Spread of the answers to one change."""


@dataclass(kw_only=True, slots=True)
class Introductions:
    """Runs for as long as the engine does."""

    registry: Registry
    own: Callable[[], WorkerView]
    order: Callable[[MeetPeers], Awaitable[None]]
    observe: Callable[[list[WorkerView]], None] = lambda _: None
    """Told who is registered, with each look."""
    random: Random = field(default_factory=Random)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    named: tuple[Peer, ...] | None = None
    """Whom the engine was told to meet last; None: the registry has not been read yet."""

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
            snapshot = await self.registry.snapshot()
        except RedisUnavailableError:
            return
        views = [record.view for record in snapshot.workers]
        self.observe(views)
        peers = whom_to_meet(self.own(), views)
        changed = peers != (self.named or ())
        self.named = peers
        if changed:
            await self.order(MeetPeers(peers=peers))


def whom_to_meet(own: WorkerView, others: Iterable[WorkerView]) -> tuple[Peer, ...]:
    """At most `MAX_LINKS` workers that KV may go to or come from; in a larger fleet another part for each worker."""
    views = [other for other in others if other.worker_id != own.worker_id and _complementary(own, other)]
    views.sort(key=lambda view: _affinity(own.incarnation, view.incarnation))
    return tuple(
        Peer(
            worker_id=view.worker_id,
            incarnation=view.incarnation,
            endpoint=view.peer_endpoint,
            compat_hash=view.compat_hash,
        )
        for view in views[:MAX_LINKS]
    )


def _complementary(own: WorkerView, other: WorkerView) -> bool:
    alike = own.role is other.role and own.role is not Role.BOTH
    return own.compat_hash == other.compat_hash and own.model == other.model and not alike


def _affinity(own: str, other: str) -> bytes:
    return blake2b(f"{own} {other}".encode(), digest_size=8).digest()
