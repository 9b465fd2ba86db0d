"""What no router can beat by much: one cache as large as all workers' together, which every request sees."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem_services.simulate.block_cache import BlockCache


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
        cache.let_go(kept)
        hits, blocks = hits + matched, blocks + len(chain)
    # Nobody follows the changes; they are dropped with the cache.
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
