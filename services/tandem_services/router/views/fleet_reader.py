"""A reader's copy of the fleet: the records of all live workers, renewed by differences.

    1. changes   each read gets the incarnations that joined, changed, lapsed or left since the last one, and describes
                 them again: at most `MAX_DESCRIBED` in one call, so that decisions do not wait for it
    2. all       at the first read, after a wipe, or if the reader missed more changes than Redis remembers
    3. figures   loads, links and statistics change with every heartbeat and are not changes. Each read describes the
                 records that are oldest: all of a small fleet, `REREAD` of a larger one, and `MAX_DESCRIBED` while
                 people look at them
    4. list      Redis is a hint, and another release notes no changes: all live incarnations are listed from time to
                 time (`LISTED_A_SECOND`), and at once after malformed values

A read by a gateway therefore costs Redis the same in any fleet. Local routing uses rates and room of the records and
counts queues and sequences itself, so records may be older than a heartbeat.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_services.router.keys import MAX_DESCRIBED, SMALL_FLEET
from tandem_services.router.registry import FleetChanges, Registry, WorkerRecord

REREAD = 1
"""Records of a larger fleet that every read describes again."""

VIEWED_S = 10.0
"""After each look of people at the figures, reads keep them as new as workers write them."""

LISTED_A_SECOND = 16
"""A fleet of 1,024 is listed every 64 s, by each gateway and by each worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSnapshot:
    """All live workers, draining and stalled ones included."""

    epoch: str
    workers: tuple[WorkerRecord, ...]
    malformed: int
    """Number of malformed values, in Redis or in its replies."""
    fenced: frozenset[str] = frozenset()
    """Incarnations of the query that have ended."""


class Snapshots(Protocol):
    """What users of a `FleetReader` require of it."""

    async def snapshot(self, missing: Iterable[str] = ()) -> FleetSnapshot: ...


@dataclass(kw_only=True, slots=True)
class FleetReader:
    """Of one process. Not thread-safe; lives on the event loop."""

    registry: Registry
    clock: Clock
    _records: dict[str, WorkerRecord] = field(default_factory=dict)
    """By incarnation, those read the longest time ago first."""
    _generation: int = 0
    _listed_at: float = -inf
    _viewed_at: float = -inf
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def snapshot(self, missing: Iterable[str] = ()) -> FleetSnapshot:
        """The fleet of now. Raises `RedisUnavailableError`; the next read continues where the last one succeeded.

        `missing`: incarnations of the caller that recent snapshots lacked, to learn whether they have ended.
        """
        async with self._reading:
            return await self._read(tuple(missing))

    def viewed(self) -> None:
        """People look at the figures of all workers."""
        self._viewed_at = self.clock.now()

    @property
    def is_viewed(self) -> bool:
        """Whether people have looked lately."""
        return self.clock.now() - self._viewed_at < VIEWED_S

    async def _read(self, missing: tuple[str, ...]) -> FleetSnapshot:
        now, small = self.clock.now(), len(self._records) <= SMALL_FLEET
        aged = tuple(islice(self._records, MAX_DESCRIBED if small or self.is_viewed else REREAD))
        listed = small or now - self._listed_at >= len(self._records) / LISTED_A_SECOND
        changes = await self.registry.changes(self._generation, listed=listed, described=aged, missing=missing)
        self._replace(aged, changes.workers)
        malformed = changes.malformed
        unread = sorted(self._unread(changes) - {*aged})
        for first in range(0, len(unread), MAX_DESCRIBED):
            some = unread[first : first + MAX_DESCRIBED]
            page = await self.registry.changes(changes.generation, described=some)
            self._replace(some, page.workers)
            malformed += page.malformed
        self._generation = changes.generation
        if changes.listed is not None:
            self._listed_at = now
        if malformed:
            self._listed_at = -inf
        return FleetSnapshot(
            epoch=changes.epoch, workers=tuple(self._records.values()), malformed=malformed, fenced=changes.fenced
        )

    def _unread(self, changes: FleetChanges) -> set[str]:
        """Incarnations to describe. Those that are live no longer are dropped."""
        if changes.listed is not None:
            self._records = {name: record for name, record in self._records.items() if name in changes.listed}
        if changes.changed is None:
            return set(changes.listed or ())
        return {*changes.changed, *((changes.listed or frozenset()) - self._records.keys())}

    def _replace(self, described: Collection[str], workers: Iterable[WorkerRecord]) -> None:
        """`workers` are what is live of `described`."""
        for name in described:
            self._records.pop(name, None)
        for record in workers:
            if record.view.incarnation in described:
                self._records[record.view.incarnation] = record
