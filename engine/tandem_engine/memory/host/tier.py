"""Copies between device and host memory: cached blocks, and the KV of swapped requests.

`HostTier`, for cached blocks:

    device page ──backup──▶ host page (pinned until the copy is acked) ──▶ evictable ──▶ evicted
                                  ▲                                          │
    device page ◀──load_back──────┼──────────── pinned by the match ◀────────┘
                                  └── read from storage (`traffic`)

Copies run on the executor in launch order, so a block can be loaded back while its backup is still queued. Only what is
outside that order, evicting the page and writing it to storage, waits for the ack [copy-acked].

`SwapSpace`, for retracted requests whose KV is restored unchanged:
    1. out      host pages are taken and the copy from the device is queued; the request releases its device pages at
                once, because whatever writes to them next runs after that copy
    2. swapped  the request has a `SwappedKv`, but no row and no device pages
    3. back     new device pages, and the copy to them is queued; forwards launched later see it
       drop     the request ended, or is recomputed after all
    4. leaving  the host pages wait until every copy that was queued by then is acked [copy-acked]

Pages at the start of the request that another request has locked are not copied: they are expected to be in the prefix
cache when it returns. If they are not, the request is recomputed.

    pages   0 ...... first_page ............... whole pages ............... the partial one
            shared   | host pages[0], host pages[1], …
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from tandem_engine.base.names import HostPageId, PageId
from tandem_engine.memory.host.pages import DIGEST_BYTES, HostBlock, HostBlocks, HostPages, TierEvents, state_keys
from tandem_engine.memory.host.storage import StorageTraffic
from tandem_engine.memory.page_copies import CopyFence, CopyKind, CopyQueue, PageCopy
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import KvEvent, Tier


class Backup(Enum):
    """What became of a block that should go to host memory [backup-result]."""

    QUEUED = "queued"
    PRESENT = "present"
    """It was there already."""
    NO_ROOM = "no_room"
    """Every host page is in use by something that cannot be evicted: the block stays where it is, or is lost."""


class Candidate(NamedTuple):
    """A block on the device that should have a copy in host memory."""

    digest: bytes
    tokens: bytes
    """Packed."""
    page: PageId


@dataclass(kw_only=True, slots=True)
class HostTier:
    """Cached blocks in host memory. Scheduler thread only."""

    pages: HostPages
    blocks: HostBlocks
    copies: CopyQueue
    events: TierEvents
    traffic: StorageTraffic | None = None
    """To and from storage; None without one."""
    state_pages: int = 0
    """Host pages that hold a state; 0 where no layer keeps one."""
    _outgoing: list[tuple[PageId, HostBlock]] = field(default_factory=list)
    """Backups that have their page and are not queued yet."""

    def find(self, digest: bytes, tokens: bytes) -> HostBlock | None:
        """The block, if it can be loaded back."""
        block = self.blocks.get(digest)
        return block if block is not None and not block.loading and block.tokens == tokens else None

    def prepare_backup(self, candidate: Candidate) -> Backup:
        """Give `candidate` a host page. `queue_backups` must follow before its device page is given back."""
        block = self.blocks.get(candidate.digest)
        if block is not None:
            self.blocks.touch(block)
            return Backup.PRESENT
        page = self.take_page()
        if page is None:
            return Backup.NO_ROOM
        block = HostBlock(digest=candidate.digest, tokens=candidate.tokens, page=page, on_device=True)
        self.blocks.add(block)
        self.events.stored(Tier.HOST, [(block.digest, True)])
        self._outgoing.append((candidate.page, block))
        return Backup.QUEUED

    def has(self, key: bytes) -> bool:
        """Whether `key` is here, or in storage. Changes nothing."""
        return self.blocks.get(key) is not None or (self.traffic is not None and key in self.traffic.storage)

    def discard(self, block: HostBlock) -> None:
        """`block`, which nothing fills after all and its adder alone pins, is out."""
        self.blocks.drop(block)
        self._unpin(block)

    def left_device(self, digest: bytes) -> bool:
        """The device drops its copy. True if the block can still be found here."""
        block = self.blocks.get(digest)
        if block is None:
            return False
        block.on_device = False
        return not block.loading

    def wanted_soon(self, digest: bytes, tokens: bytes) -> HostBlock | None:
        """The block; if only storage has it, its read begins. None if no tier has it, or no page is free."""
        block = self.blocks.get(digest)
        if block is not None:
            self.blocks.touch(block)
            return block
        if self.traffic is None or digest not in self.traffic.storage:
            return None
        page = self.take_page()
        if page is None:
            return None
        block = HostBlock(digest=digest, tokens=tokens, page=page, loading=True, origin=Tier.DISK)
        self.blocks.add(block)
        self.traffic.read(block)
        return block

    def queue_backups(self) -> None:
        """One copy for all that was prepared, which was the end of a prefix before its beginning."""
        if not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        copy = PageCopy(
            kind=CopyKind.DEVICE_TO_HOST,
            source=[page for page, _ in outgoing],
            target=[block.page for _, block in outgoing],
        )
        self.copies.launch(copy, partial(self._backed_up, [block for _, block in outgoing]))

    def load_back(self, blocks: Sequence[HostBlock], pages: Sequence[PageId]) -> None:
        """Queue the copy of `blocks`, which the caller has pinned, to device `pages`. Its ack unpins them."""
        copy = PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=[block.page for block in blocks], target=pages)
        self.copies.launch(copy, partial(self.unpin, blocks))

    def unpin(self, blocks: Sequence[HostBlock]) -> None:
        """Give back a pin of each block of a prefix, the deepest first: the end is evicted before the beginning."""
        for block in reversed(blocks):
            self._unpin(block)

    def take_page(self) -> HostPageId | None:
        """A free page, or that of the least recently used block; None without either."""
        page = self.pages.take_for_cache()
        return self._evict_one() if page is None else page

    def make_room(self, n: int) -> bool:
        """Have `n` pages on the free list, evicting as needed. False, and nothing evicted, if it cannot."""
        if n > self.pages.available + self.blocks.evictable:
            return False
        while self.pages.available < n:
            page = self._evict_one()
            assert page is not None, f"{self.blocks.evictable} evictable host blocks, none could be evicted"
            self.pages.free_cached(page)
        return True

    def clear(self) -> None:
        """Drop every block; pages that a copy or a read still touches are free when that ends."""
        for block in [*self.blocks]:
            freed = self.blocks.drop(block)
            if freed is not None:
                self.pages.free_cached(freed)
            if not block.loading:
                self.events.removed(Tier.HOST, [(block.digest, block.on_device)])
        if self.traffic is not None:
            self.traffic.clear()

    def snapshot_events(self) -> list[KvEvent]:
        """Everything here and in storage, for a replay that named the device's blocks before."""
        snapshot = TierEvents()
        snapshot.stored(Tier.HOST, [(block.digest, block.on_device) for block in self.blocks if not block.loading])
        if self.traffic is not None:
            snapshot.stored(Tier.DISK, [(key, False) for key in self.traffic.storage.hashes()])
        return snapshot.take()

    def poll(self) -> bool:
        """Take in what storage has done. True if anything."""
        return self.traffic is not None and self.traffic.poll()

    def _evict_one(self) -> HostPageId | None:
        block = self.blocks.evict()
        if block is None:
            return None
        self.events.removed(Tier.HOST, [(block.digest, block.on_device)])
        if not block.on_device and len(block.digest) == DIGEST_BYTES:
            self._drop_state(block.digest)
        return block.page

    def _drop_state(self, digest: bytes) -> None:
        """Nothing has the block of `digest` any more, so its state cannot be continued from."""
        for key in state_keys(digest, self.state_pages):
            part = self.blocks.get(key)
            if part is not None and part.pins == 0:
                page = self.blocks.drop(part)
                assert page is not None, "an unpinned part kept its page"
                self.pages.free_cached(page)

    def _backed_up(self, blocks: Sequence[HostBlock]) -> None:
        if self.traffic is not None:
            self.traffic.store([block for block in blocks if not block.dropped])
        for block in blocks:
            self._unpin(block)

    def _unpin(self, block: HostBlock) -> None:
        freed = self.blocks.unpin(block)
        if freed is not None:
            self.pages.free_cached(freed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedKv:
    """KV of tokens [first_page * page_size, committed_len), owned by one request."""

    first_page: int
    pages: tuple[HostPageId, ...]
    committed_len: int
    state: tuple[HostPageId, ...] = ()
    """Of the state after those tokens, where layers keep one."""

    @property
    def all_pages(self) -> tuple[HostPageId, ...]:
        return (*self.pages, *self.state)


@dataclass(kw_only=True, slots=True)
class SwapSpace:
    """Moves KV of requests between device and host. Scheduler thread only."""

    host: HostTier
    copies: CopyQueue
    leaving: CopyFence[HostPageId]
    state_pages: int = 0
    """Host pages that hold a state; 0 where no layer keeps one."""

    def pages_to_move(self, kv: RequestKv, *, shared: int) -> int:
        """Pages that `out` would copy when the first `shared` stay in the cache, those of its state included."""
        return -(-kv.committed_len // kv.page_size) - shared + self.state_pages

    def out(self, kv: RequestKv, *, shared: int) -> SwappedKv | None:
        """Queue the copy of the settled KV of `kv`, and of its state. None, and nothing happened, if host memory has no
        room. No step is in flight, so the state is that after the settled tokens.
        """
        wanted = self.pages_to_move(kv, shared=shared)
        self.poll()
        if not self.host.make_room(wanted):
            return None
        pages = self.host.pages.take_for_swap(wanted)
        assert pages is not None, f"no {wanted} host pages after room was made for them"
        state, taken = pages[: self.state_pages], pages[self.state_pages :]
        source = kv.pages[shared : shared + len(taken)]
        self.copies.launch(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=source, target=taken))
        if state:
            self.copies.launch(PageCopy(kind=CopyKind.STATE_TO_HOST, source=self._parts(kv), target=state))
        return SwappedKv(first_page=shared, pages=tuple(taken), committed_len=kv.committed_len, state=tuple(state))

    def completes(self, swapped: SwappedKv, kv: RequestKv) -> bool:
        """Whether the prefix that `kv` matched reaches to where `swapped` begins."""
        return kv.matched_len >= swapped.first_page * kv.page_size

    def back(self, swapped: SwappedKv, kv: RequestKv) -> None:
        """Queue the copy of what `kv` did not find in the cache to its private pages, and commit it.

        Its slower part has been loaded back.
        """
        assert self.completes(swapped, kv), f"row {kv.row}: {kv.committed_len} tokens matched, {swapped} begins later"
        found = kv.committed_len // kv.page_size
        source = swapped.pages[found - swapped.first_page :]
        if source:
            target = kv.pages[found : found + len(source)]
            kv.copy = self.copies.launch(PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=source, target=target))
        if swapped.state:
            copy = PageCopy(kind=CopyKind.HOST_TO_STATE, source=swapped.state, target=self._parts(kv))
            kv.copy = self.copies.launch(copy)
        kv.committed_len = kv.computed_from = swapped.committed_len
        self.drop(swapped)

    def drop(self, swapped: SwappedKv) -> None:
        """The host pages are not needed beyond the copies that are queued now."""
        if self.leaving.needed:
            self.leaving.hold(swapped.all_pages)
        else:
            self.host.pages.free_swapped(swapped.all_pages)

    def poll(self) -> None:
        """Free what left, as far as its copies are acked."""
        if len(self.leaving):
            self.host.pages.free_swapped(self.leaving.passed())

    def _parts(self, kv: RequestKv) -> range:
        """Of the state in its row."""
        return range(kv.row * self.state_pages, (kv.row + 1) * self.state_pages)

    def leaving_pages(self) -> Iterator[HostPageId]:
        """Pages of no request that copies may still touch (audit)."""
        return iter(self.leaving)
