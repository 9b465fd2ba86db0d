"""The KV pages of a simulated worker: a prefix cache with least-recently-used eviction, in whole blocks.

A block is in one of three states, and all three share the capacity:

    private  taken by a request: prompt that is not computed yet, or output
    held     cached and part of a running request: stays
    idle     cached and evictable, oldest first

A request releases its blocks from the last to the first, so that a prefix is always younger than what follows it and is
evicted after it, as in the engine's radix tree. Blocks served to another worker count as oldest, from their end up to
where another path branches off.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem_services.router.index import IndexUpdate, UpdateKind


class BlockCache:
    """`capacity` blocks, known by the digests that the router's index uses."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._private = 0
        self._held: Counter[bytes] = Counter()
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._before: dict[bytes, bytes] = {}
        """Cached block → the cached block before it."""
        self._following: Counter[bytes] = Counter()
        """Number of cached blocks that directly follow one."""
        self._changes: list[tuple[UpdateKind, list[bytes]]] = []

    @property
    def room(self) -> int:
        """Blocks that a request could take or hold: free or idle."""
        return self.capacity - self._private - len(self._held)

    @property
    def cached(self) -> int:
        return len(self._held) + len(self._idle)

    def match(self, chain: Sequence[bytes]) -> int:
        """Leading blocks of `chain` that are cached."""
        for position, block in enumerate(chain):
            if block not in self._idle and block not in self._held:
                return position
        return len(chain)

    def idle_among(self, blocks: Sequence[bytes]) -> int:
        """Number of cached `blocks` that no request holds: holding them takes space."""
        return sum(block in self._idle for block in blocks)

    def hold(self, blocks: Sequence[bytes]) -> None:
        """Holds cached blocks until they are released."""
        for block in blocks:
            self._idle.pop(block, None)
            self._held[block] += 1

    def take(self, count: int) -> None:
        """Make `count` blocks private, at the cost of idle ones. They must fit in `room`."""
        assert count <= self.room, f"{count} blocks do not fit in {self.room}"
        self._private += count
        while self._private + self.cached > self.capacity:
            block, _ = self._idle.popitem(last=False)
            self._unlink(block)
            self._note(UpdateKind.REMOVED, block)

    def store(self, chain: Sequence[bytes], first: int = 0) -> None:
        """Private blocks, those of `chain` from `first` on, are computed now: cached, and held.

        Those that another request has stored in the meantime become free.
        """
        self._private -= len(chain) - first
        for position in range(first, len(chain)):
            block = chain[position]
            if block not in self._held and block not in self._idle:
                self._note(UpdateKind.STORED, block)
                if position:
                    self._before[block] = chain[position - 1]
                    self._following[chain[position - 1]] += 1
        self.hold(chain[first:])

    def release(self, blocks: Sequence[bytes], *, spent: bool = False) -> None:
        """A request has ended: what no other one holds becomes idle. `spent`: another worker has the blocks, too, so
        those at their end from which no other chain continues are the first to leave."""
        for block in reversed(blocks):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._idle[block] = None
        if spent:
            self._age(blocks)

    def give_back(self, count: int) -> None:
        """Private blocks become free."""
        self._private -= count

    def changes(self) -> list[IndexUpdate]:
        """What was stored and removed since the last call, in order."""
        updates = [IndexUpdate(kind, tuple(blocks)) for kind, blocks in self._changes]
        self._changes = []
        return updates

    def _age(self, blocks: Sequence[bytes]) -> None:
        spent: list[bytes] = []
        for block in reversed(blocks):
            if block not in self._idle or self._following[block] > bool(spent):
                break
            spent.append(block)
        for block in reversed(spent):
            self._idle.move_to_end(block, last=False)

    def _unlink(self, block: bytes) -> None:
        before = self._before.pop(block, None)
        if before is not None:
            self._following[before] -= 1
            if not self._following[before]:
                del self._following[before]

    def _note(self, kind: UpdateKind, block: bytes) -> None:
        if self._changes and self._changes[-1][0] is kind:
            self._changes[-1][1].append(block)
        else:
            self._changes.append((kind, [block]))


@dataclass(frozen=True, slots=True)
class HitRate:
    """Blocks of prompts, and how many of them were cached when they were needed."""

    hits: int
    blocks: int

    @property
    def share(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def pooled_lru(chains: Iterable[Sequence[bytes]], capacity: int) -> HitRate:
    """One LRU cache of `capacity` blocks, requests one after the other. Longer prompts than it keep their beginning."""
    cache = BlockCache(capacity)
    hits = blocks = 0
    for chain in chains:
        matched = cache.match(chain)
        kept = chain[:capacity]
        cache.hold(kept[:matched])
        cache.take(len(kept) - matched)
        cache.store(kept, matched)
        cache.release(kept)
        hits, blocks = hits + matched, blocks + len(chain)
    # No index follows the changes; they are dropped with the cache.
    return HitRate(hits, blocks)


def infinite_cache(chains: Iterable[Sequence[bytes]]) -> HitRate:
    """Every block is computed once."""
    seen: set[bytes] = set()
    hits = blocks = 0
    for chain in chains:
        hits += sum(block in seen for block in chain)
        blocks += len(chain)
        seen.update(chain)
    return HitRate(hits, blocks)
