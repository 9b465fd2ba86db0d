"""The host memory of an engine: a pool of pages, its cached blocks, and the space for swapped requests.

A host page is free, a cached block, of a swapped request, or leaving (a queued copy may still touch it).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

from tandem_engine.base.names import HostPageId
from tandem_engine.config import HostConfig
from tandem_engine.memory.allocator import each_once
from tandem_engine.memory.host.pages import HostBlocks, HostPages, HostPool, TierEvents
from tandem_engine.memory.host.states import StatefulTiers
from tandem_engine.memory.host.storage import HostStorage, StorageTraffic
from tandem_engine.memory.host.tier import HostTier, SwappedKv, SwapSpace
from tandem_engine.memory.host.tiered_cache import TieredCache
from tandem_engine.memory.page_copies import CopyFence, CopyQueue
from tandem_engine.memory.state_anchors import StateAnchors

NAMED = 5
"""Pages that one sentence lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Sizes of the sets of host pages, and sentences about what does not add up."""

    free: int = 0
    cached: int = 0
    swapped: int = 0
    leaving: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """What an engine has below its device memory. Scheduler thread only."""

    pool: HostPool
    tier: HostTier
    swap: SwapSpace
    cache: TieredCache | None
    """The prefix cache, when it has tiers."""
    prefetch_timeout: float
    """Seconds that a request waits at most for storage."""

    @classmethod
    def build(
        cls,
        pool: HostPool,
        copies: CopyQueue,
        config: HostConfig,
        *,
        page_size: int,
        storage: HostStorage | None,
        state_pages: int = 0,
        anchors: StateAnchors | None = None,
    ) -> Self:
        """Host memory around `pool`, with a prefix cache if `config` enables one.

        `state_pages`: of `SwapSpace`. `anchors`: where prefixes on the device continue, if layers keep states.
        """
        reserve = min(pool.num_pages, config.swap_pages(pool.page_bytes))
        pages, blocks, events = HostPages(pool.num_pages, reserve=reserve), HostBlocks(), TierEvents()
        traffic = None
        if storage is not None:
            traffic = StorageTraffic(storage=storage, pool=pool, pages=pages, blocks=blocks, events=events)
        tier = HostTier(
            pages=pages, blocks=blocks, copies=copies, events=events, traffic=traffic, state_pages=state_pages
        )
        cache = None
        if config.enable_cache:
            make = TieredCache if anchors is None else partial(StatefulTiers, anchors=anchors)
            cache = make(page_size=page_size, page_bytes=pool.page_bytes, host=tier, policy=config.write_policy)
        swap = SwapSpace(host=tier, copies=copies, leaving=CopyFence(copies=copies), state_pages=state_pages)
        return cls(pool=pool, tier=tier, swap=swap, cache=cache, prefetch_timeout=config.prefetch_timeout)

    def poll(self) -> bool:
        """Once per turn, before planning. True if anything moved."""
        self.swap.poll()
        return self.cache is not None and self.cache.poll()

    @property
    def stored_blocks(self) -> int:
        """Blocks in storage."""
        return 0 if self.tier.traffic is None else len(self.tier.traffic.storage)

    @property
    def not_stored_blocks(self) -> int:
        """Blocks that storage did not take."""
        return 0 if self.tier.traffic is None else self.tier.traffic.not_stored

    def audit(self, swapped: Iterable[SwappedKv]) -> HostReport:
        """Collect the four sets of host pages from their owners; `swapped` of every live request. Changes nothing."""
        claims = {
            "the host free list": [*self.tier.pages.free_page_ids()],
            "a cached host block": [*self.tier.blocks.pages()],
            "a swapped request": [page for kv in swapped for page in kv.all_pages],
            "a copy": [*self.swap.leaving_pages()],
        }
        free, cached, taken, leaving = claims.values()
        return HostReport(
            free=len(free),
            cached=len(cached),
            swapped=len(taken),
            leaving=len(leaving),
            problems=tuple(page_problems(claims, self.tier.pages.num_pages)),
        )

    def descriptors(self) -> list[int]:
        """Readable when storage has done something."""
        return [] if self.tier.traffic is None else [self.tier.traffic.fileno()]

    def close(self) -> None:
        """Finish what is being written to storage. Idempotent."""
        if self.tier.traffic is not None:
            self.tier.traffic.close()


def page_problems(claims: dict[str, list[HostPageId]], num_pages: int) -> Iterator[str]:
    """Pages that no set of `claims` has, or more than one."""
    if each_once(claims.values(), num_pages):
        return
    counts = Counter(page for pages in claims.values() for page in pages)
    if lost := [page for page in range(num_pages) if page not in counts]:
        yield f"host pages {lost[:NAMED]} leaked: no set has them ({len(lost)} in all)"
    for page in sorted(page for page, count in counts.items() if count > 1)[:NAMED]:
        owners = [owner for owner, pages in claims.items() for claimed in pages if claimed == page]
        yield f"host page {page} has {len(owners)} owners: {' and '.join(owners)}"
