"""The prefix cache over device, host memory and storage.

    1. insert       on the device, in the tree; `write_through` marks it for backup
    2. backup       queued at the next `poll`, a bounded number per iteration, never while a result is settled
                    [backup-queued]
    3. both         device and host have it; each may evict its copy independently [mirror-reclaimable]
    4. device evict without a host copy it is backed up now, under `write_back`
    5. host only    a match of the tree continues here, block by block, and pins what it finds [pinned-host-block]
    6. load-back    a request is admitted with it: copied to pages of that request, which enter the tree
    7. host evict   least recently used first; storage has it, or it is lost

    policy                    backed up when                                      evicting from the device costs
    write_through             inserted                                            nothing, mostly
    write_through_selective   a later request was admitted with it                nothing; the rest is lost
    write_back                evicted from the device                             a copy that runs before its pages are
                                                                                  written again

The tree is independent of tiers; it reports what it adds and drops (`TreeWatcher`). Nothing here blocks: copies run in
launch order, so an evicted page is safe for the next forward at once, and the allocator withholds it from peers until
its copy is acked [page-fence].
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.config import WritePolicy
from tandem_engine.memory.host.pages import HostBlock
from tandem_engine.memory.host.tier import Candidate, HostTier
from tandem_engine.memory.prefix_cache import InsertResult, LoadedPages, Lock, MatchResult
from tandem_engine.memory.radix_cache import Node, PathLock, RadixCache
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, KvEvent, Tier, chain_packed, pack_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch:
    """Blocks on their way from storage to host memory, for one request."""

    blocks: Sequence[HostBlock]
    until: float
    """Monotonic time after which the request continues without what is missing."""

    @property
    def done(self) -> bool:
        """Whether every block is there, or will not come."""
        return not any(block.loading for block in self.blocks)


BACKUP_BYTES = 16 << 20
"""Backed up per turn of the loop: some milliseconds of a CPU's memory, by which the next step is late."""

PREFETCH_SHARE = 2
"""One request may have at most the host tier divided by this read from storage."""


@dataclass(kw_only=True, slots=True)
class HostPrefix:
    """Implements `SlowerPrefix`."""

    cache: "TieredCache"
    lock: PathLock
    blocks: Sequence[HostBlock]

    @property
    def num_pages(self) -> int:
        return len(self.blocks)

    @property
    def has_state(self) -> bool:
        return False

    def load(self, pages: Sequence[PageId], row: ReqPoolIdx | None = None) -> LoadedPages:
        assert row is None, f"row {row} gets a state of a model without states"
        return self.cache.load(self, pages)

    def release(self) -> None:
        self.cache.host.unpin(self.blocks)


class TieredCache:
    """Implements `PrefixCache` and `TreeWatcher`."""

    def __init__(
        self,
        *,
        page_size: int,
        page_bytes: int,
        host: HostTier,
        policy: WritePolicy,
        usable: Callable[[Sequence[PageId]], int] | None = None,
    ) -> None:
        """`usable` as of `RadixCache`."""
        self.host = host
        self._tree = RadixCache(page_size, watcher=self, usable=usable)
        self._page_size = page_size
        self._policy = policy
        self._backups_per_turn = max(1, BACKUP_BYTES // page_bytes)
        self._wanted: dict[bytes, Candidate] = {}
        """To be backed up: blocks on the device, in the order in which they were wanted."""
        self._clearing = False

    # PrefixCache

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        """The tree's part comes as `pages`, what host memory has after it as `slower`, pinned."""
        found = self._tree.match(token_ids, space=space, max_tokens=max_tokens)
        assert isinstance(found.lock, PathLock), f"{found.lock!r} is not a lock of the tree"
        blocks = self._continuation(token_ids, max_tokens, found)
        for block in blocks:
            self.host.blocks.pin(block)
        slower = HostPrefix(cache=self, lock=found.lock, blocks=blocks)
        return MatchResult(pages=found.pages, lock=found.lock, slower=slower)

    def peek(self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None) -> int:
        """On the device alone: what needs no new page."""
        return self._tree.peek(token_ids, space=space, max_tokens=max_tokens)

    def peek_after(self, lock: Lock, token_ids: Sequence[int]) -> int:
        return self._tree.peek_after(lock, token_ids)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[PageId], *, space: CacheSpace = BASE_SPACE
    ) -> InsertResult:
        return self._tree.insert(token_ids, pages, space=space)

    def extend(self, lock: Lock, token_ids: Sequence[int], pages: Sequence[PageId]) -> InsertResult:
        return self._tree.extend(lock, token_ids, pages)

    def unlock(self, lock: Lock, *, spent: bool = False) -> None:
        self._tree.unlock(lock, spent=spent)

    def evict(self, num_pages: int) -> list[PageId]:
        """Also queues the backups of what leaves. The pages may be written by forwards and copies at once."""
        pages = self._tree.evict(num_pages)
        self.host.queue_backups()
        return pages

    def evictable_pages(self) -> int:
        return self._tree.evictable_pages()

    def shared_pages(self, lock: Lock) -> int:
        return self._tree.shared_pages(lock)

    def pages(self) -> Iterator[PageId]:
        return self._tree.pages()

    def clear(self) -> list[PageId]:
        """Every tier, storage included: nothing of what was cached can be found again."""
        self._tree.announce()
        self._wanted.clear()
        self.host.clear()
        self._clearing = True
        try:
            return self._tree.clear()
        finally:
            self._clearing = False

    def take_events(self) -> list[KvEvent]:
        self._tree.announce()
        return self.host.events.take()

    def snapshot_events(self) -> list[KvEvent]:
        self._tree.announce()
        return [*self._tree.snapshot_events(), *self.host.snapshot_events()]

    def audit(self, locks: Iterable[Lock]) -> list[str]:
        return [*self._tree.audit(locks), *self.host.blocks.audit()]

    # Tiers

    def poll(self) -> bool:
        """Once per turn, before planning: take in what storage did, queue backups. True if anything moved."""
        self._tree.announce()
        moved = self.host.poll()
        if not self._wanted:
            return moved
        due = [*islice(self._wanted, self._backups_per_turn)]
        for digest in reversed(due):
            self.host.prepare_backup(self._wanted.pop(digest))
        self.host.queue_backups()
        return True

    def load(self, prefix: HostPrefix, pages: Sequence[PageId]) -> LoadedPages:
        """A request was admitted with `prefix`: copy it to `pages`, which the caller inserts in the tree."""
        self._count_hit(prefix.lock.node)
        from_disk = sum(block.origin is Tier.DISK for block in prefix.blocks)
        for block in prefix.blocks:
            block.origin = Tier.HOST
        if prefix.blocks:
            self.host.load_back(prefix.blocks, pages)
        return LoadedPages(host=len(prefix.blocks) - from_disk, disk=from_disk)

    def prefetch(
        self, token_ids: Sequence[int], *, space: CacheSpace, max_tokens: int, until: float
    ) -> Prefetch | None:
        """Read what storage has after the prefix in device and host memory. None if there is nothing to wait for."""
        if self.host.traffic is None or not len(self.host.traffic.storage):
            return None
        found = self._tree.match(token_ids, space=space, max_tokens=max_tokens)
        self._tree.unlock(found.lock)
        loading = self._worth_reading(found, token_ids, max_tokens)
        return Prefetch(blocks=loading, until=until) if loading else None

    def _worth_reading(self, found: MatchResult, token_ids: Sequence[int], max_tokens: int) -> list[HostBlock]:
        """The blocks after `found` that storage reads now."""
        loading: list[HostBlock] = []
        for digest, tokens in self._hashes_after(found, token_ids, max_tokens):
            block = self.host.wanted_soon(digest, tokens) if len(loading) < self.prefetch_limit else None
            if block is None:
                break
            if block.loading:
                loading.append(block)
        return loading

    @property
    def prefetch_limit(self) -> int:
        """Pages that one request may have read."""
        return self.host.pages.cache_capacity // PREFETCH_SHARE

    # TreeWatcher

    def stored(self, node: Node, start: int, stop: int) -> None:
        marked = []
        for candidate in candidates_of(node, start, stop):
            block = self.host.blocks.get(candidate.digest)
            if block is not None:
                block.on_device = True
            elif self._policy is WritePolicy.WRITE_THROUGH:
                self._wanted[candidate.digest] = candidate
            marked.append((candidate.digest, block is not None and not block.loading))
        self.host.events.stored(Tier.DEVICE, marked)

    def dropping(self, leaf: Node, keep: int) -> None:
        """Deepest first, so that of a prefix the host, too, evicts the end before the beginning."""
        leaving = [*reversed(candidates_of(leaf, keep, len(leaf)))]
        for candidate in leaving:
            self._wanted.pop(candidate.digest, None)
            if not self._clearing and (leaf.hits > 0 or not self._is_selective):
                self.host.prepare_backup(candidate)
        # Only now: making room for one of them may have evicted the host's copy of another.
        marked = [(candidate.digest, self.host.left_device(candidate.digest)) for candidate in leaving]
        self.host.events.removed(Tier.DEVICE, marked)

    @property
    def _is_selective(self) -> bool:
        return self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE

    def _continuation(
        self, token_ids: Sequence[int], max_tokens: int | None, found: MatchResult
    ) -> Sequence[HostBlock]:
        """What host memory has right after the device's part."""
        if not len(self.host.blocks):
            return ()
        blocks = []
        for digest, tokens in self._hashes_after(found, token_ids, max_tokens):
            block = self.host.find(digest, tokens)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hashes_after(
        self, found: MatchResult, token_ids: Sequence[int], max_tokens: int | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Hash and packed tokens of each whole block after the device's part, computed on demand."""
        assert isinstance(found.lock, PathLock), f"{found.lock!r} is not a lock of the tree"
        size, digest = self._page_size, found.lock.node.last_hash()
        stop = len(token_ids) if max_tokens is None else min(len(token_ids), max_tokens)
        for start in range(len(found.pages) * size, stop - size + 1, size):
            packed = pack_tokens(token_ids[start : start + size])
            (digest,) = chain_packed(packed, len(packed), parent=digest)
            yield digest, packed

    def _count_hit(self, node: Node) -> None:
        for used in node.lineage():
            used.hits += 1
            if used.hits == 1 and self._is_selective:
                for candidate in candidates_of(used, 0, len(used)):
                    if self.host.blocks.get(candidate.digest) is None:
                        self._wanted[candidate.digest] = candidate


def candidates_of(node: Node, start: int, stop: int) -> list[Candidate]:
    """Blocks [start, stop) of `node`."""
    hashes, size = node.chain(), node.block_bytes
    return [
        Candidate(hashes[index], bytes(node.key[index * size : (index + 1) * size]), node.pages[index])
        for index in range(start, stop)
    ]
