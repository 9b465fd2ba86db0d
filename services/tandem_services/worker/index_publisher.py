"""Publishes the engine's prefix cache to the index, in order and without gaps.

1. The engine numbers its batches. A missing number is a lost message: request a replay, and ignore all batches until it
   starts (with `AllCleared`).
2. Events are queued and sent in bounded, paced updates. Each names the revision that it builds on. A replay starts
   slowly: after a loss of Redis all workers replay at once, and routing decisions must still get through.
3. Redis unavailable: the queue waits up to a bound. Beyond it the queue is dropped and a replay is due, which is
   requested from the engine only after Redis answers again.
4. Redis available again, wiped or not: an update that does not fit (GAP), or a heartbeat that reports an older revision
   than the acknowledged one, makes a replay due.
5. An update without a reply is repeated under the same revision, so it counts once.
6. Redis may evict a part of the index by block (scripts/holders.lua) and keep the rest. Blocks of it are therefore
   named again in turn, each within `ROUND` × `NAME_AGAIN_S`.

A block counts while device or host memory has it: it is added with the first of the two and removed with the last. The
index also records which blocks are only in host memory. Blocks that are only in files do not count.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch, Tier
from tandem_services.common.recording import estimating
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.index import Applied, IndexUpdate, UpdateKind, is_sampled

logger = logging.getLogger(__name__)

CHUNK_HASHES = 1_000
"""Blocks per update: a third of a millisecond of Redis, during which no request is routed."""

PACE_S = 0.05
"""Between two updates of one worker: at most 20,000 blocks a second, also in a replay (back in 30 s)."""

RAMP = 8
"""The first pause of a replay is so many times `PACE_S`, each one after it half as long as the one before."""

RETRY_S = 0.5
"""Before sending again what Redis did not answer."""

MAX_PENDING_HASHES = 200_000
"""Queued while Redis is away: some 16 MB. A replay brings more than that back just as well."""

NAME_AGAIN_S = 15.0
"""Between two updates that name blocks again."""

ROUND = 40
"""Updates that name all blocks again: ten minutes. At most 200 digests each for a pool of a million tokens."""

REPLAY_AGAIN_S = 5.0
"""A replay that has not begun by then was lost, request or answer."""


class IndexWriter(Protocol):
    """The part of `BlockIndex` that a worker uses."""

    async def apply(
        self, incarnation: str, updates: Sequence[IndexUpdate], *, page_size: int, builds_on: int, revision: int
    ) -> Applied:
        """Raises `RedisUnavailableError`; then it is unknown whether the update was applied."""
        ...


@dataclass(frozen=True, slots=True)
class _Update:
    """Sent and not answered. Kept unchanged, so that repeating it is harmless."""

    revision: int
    events: tuple[IndexUpdate, ...]


@dataclass(kw_only=True, slots=True)
class IndexFeed:
    """One per worker. `accept` is called for each batch, `run` sends."""

    index: IndexWriter
    incarnation: str
    page_size: Callable[[], int]
    """Tokens of a block."""
    clock: Clock
    ask_replay: Callable[[], Awaitable[None]]
    """Sends `ReplayCache` to the engine."""
    reachable: Callable[[], bool]
    """Whether Redis answered lately."""
    acknowledged: int = -1
    """Revision that the index is known to have reached; −1 for none."""
    replays: int = 0
    """Requested since start."""
    _sequence: int = 0
    _pending: deque[IndexUpdate] = field(default_factory=deque)
    _pending_hashes: int = 0
    _sent: _Update | None = None
    _next_revision: int = 1
    _since_clear: int = 0
    """Updates that were acknowledged since the index was last cleared."""
    _stored: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Sampled blocks that were queued or sent, those named again last at the end."""
    _name_at: float = 0.0
    _awaiting_replay: bool = False
    _ask_at: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        # The index of a new incarnation begins with CLEARED, whatever stands under its name.
        self._clear()
        self._name_at = self.clock.now() + NAME_AGAIN_S

    @estimating(lambda self, _: self.lose("a batch of events could not be read"))
    def accept(self, batch: KvEventBatch) -> None:
        """Queue the events of one batch, or begin to wait for a replay when one before it is missing."""
        expected, self._sequence = self._sequence + 1, batch.sequence
        starts_with_clear = bool(batch.events) and isinstance(batch.events[0], AllCleared)
        if starts_with_clear:
            self._awaiting_replay = False
        elif batch.sequence != expected and not self._awaiting_replay:
            self.lose(f"KV events {expected} to {batch.sequence - 1} are missing")
        if self._awaiting_replay:
            return
        for event in batch.events:
            self._queue(event)
        self._wake.set()

    def check(self, cursor: int, acknowledged_before: int) -> None:
        """Compare the index's revision with the one acknowledged before the query."""
        if cursor < acknowledged_before:
            self.lose(f"the index stands at revision {cursor} instead of {acknowledged_before}")

    def lose(self, reason: str) -> None:
        """The index and the cache no longer agree: drop the queue and ask the engine for everything."""
        if self._awaiting_replay:
            return
        logger.warning("publishing the prefix cache again: %s", reason)
        self._awaiting_replay = True
        self._ask_at = self.clock.now()
        self.acknowledged = -1
        self._pending.clear()
        self._pending_hashes = 0
        self._sent = None
        self._wake.set()

    async def run(self) -> None:
        """Send queued updates until canceled."""
        while True:
            if self._awaiting_replay:
                await self._ask_for_replay()
                continue
            self._name_again()
            if self._sent is None and not self._pending:
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(NAME_AGAIN_S):
                        await self._wake.wait()
            else:
                await self._send()

    async def _ask_for_replay(self) -> None:
        if self.clock.now() >= self._ask_at and self.reachable():
            self._ask_at = self.clock.now() + REPLAY_AGAIN_S
            self.replays += 1
            await self.ask_replay()
        await asyncio.sleep(PACE_S)

    async def _send(self) -> None:
        update = self._sent = self._sent or self._take()
        try:
            outcome = await self.index.apply(
                self.incarnation,
                update.events,
                page_size=self.page_size(),
                builds_on=self.acknowledged,
                revision=update.revision,
            )
        except RedisUnavailableError:
            if self._pending_hashes > MAX_PENDING_HASHES:
                self.lose("Redis takes no updates and the queue is full")
            await asyncio.sleep(RETRY_S)
            return
        if self._sent is update:
            self._settle(update, outcome)
        await asyncio.sleep(self.pause_s)

    @property
    def pause_s(self) -> float:
        """Before the next update."""
        if self._pending_hashes <= CHUNK_HASHES:
            return PACE_S
        return PACE_S * max(RAMP >> max(self._since_clear - 1, 0), 1)

    def _settle(self, update: _Update, outcome: Applied) -> None:
        if outcome is Applied.GAP:
            self.lose("the index is at another revision than this worker")
            return
        self.acknowledged = update.revision
        self._since_clear += 1
        self._sent = None

    def _take(self) -> _Update:
        """The next events, up to a chunk."""
        events: list[IndexUpdate] = []
        hashes = 0
        while self._pending and (not events or hashes + len(self._pending[0].hashes) <= CHUNK_HASHES):
            event = self._pending.popleft()
            hashes += len(event.hashes)
            events.append(event)
        self._pending_hashes -= hashes
        revision, self._next_revision = self._next_revision, self._next_revision + 1
        return _Update(revision, tuple(events))

    def _queue(self, event: KvEvent) -> None:
        match event:
            case AllCleared():
                self._clear()
            case BlockStored(tier=Tier.DISK) | BlockRemoved(tier=Tier.DISK):
                return
            case BlockStored(tier=Tier.HOST, elsewhere=True) | BlockRemoved(tier=Tier.HOST, elsewhere=True):
                return
            case BlockStored(hashes=hashes, elsewhere=True):
                self._send_later(UpdateKind.ON_DEVICE, hashes)
            case BlockRemoved(hashes=hashes, elsewhere=True):
                self._send_later(UpdateKind.HOST_ALONE, hashes)
            case BlockStored(hashes=hashes, tier=tier):
                self._send_later(UpdateKind.STORED, hashes)
                if tier is Tier.HOST:
                    self._send_later(UpdateKind.HOST_ALONE, hashes)
            case BlockRemoved(hashes=hashes, tier=tier):
                self._send_later(UpdateKind.REMOVED, hashes)
                if tier is Tier.HOST:
                    self._send_later(UpdateKind.ON_DEVICE, hashes)

    def _name_again(self) -> None:
        """Queue some blocks of the index by block, if any are due."""
        now = self.clock.now()
        if now < self._name_at or not self._stored:
            return
        self._name_at = now + NAME_AGAIN_S
        named = tuple(islice(self._stored, ceil(len(self._stored) / ROUND)))
        for digest in named:
            self._stored.move_to_end(digest)
        self._send_later(UpdateKind.NAMED_AGAIN, named)

    def _keep_sampled(self, kind: UpdateKind, hashes: Sequence[bytes]) -> None:
        """Follow what the index by block has of this worker."""
        if kind is UpdateKind.STORED:
            page_size = self.page_size()
            self._stored.update((digest, None) for digest in hashes if is_sampled(digest, page_size))
        elif kind is UpdateKind.REMOVED:
            for digest in hashes:
                self._stored.pop(digest, None)

    def _send_later(self, kind: UpdateKind, hashes: tuple[bytes, ...]) -> None:
        self._keep_sampled(kind, hashes)
        self._pending.extend(_chunks(kind, hashes))
        self._pending_hashes += len(hashes)

    def _clear(self) -> None:
        """Updates queued before a CLEARED are obsolete. CLEARED is therefore always first in its update."""
        self._pending.clear()
        self._pending.append(IndexUpdate(UpdateKind.CLEARED))
        self._pending_hashes = 0
        self._stored.clear()
        self._since_clear = 0
        self._sent = None


def _chunks(kind: UpdateKind, hashes: tuple[bytes, ...]) -> Iterator[IndexUpdate]:
    for start in range(0, len(hashes), CHUNK_HASHES):
        yield IndexUpdate(kind, hashes[start : start + CHUNK_HASHES])
