"""The host tier: blocks go in by copies from the device, and back by copies to it.

    device page ──backup──▶ host page (pinned until the copy is acked) ──▶ evictable ──▶ evicted
                                  ▲                                          │
    device page ◀──load_back──────┼──────────── pinned by the match ◀────────┘
                                  └── read from storage (`traffic`)

Copies run on the executor in launch order, so a block can be loaded back while its backup is still queued.
Only what is off that order, evicting the page and writing it to storage, waits for the ack [copy-acked].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from tandem_engine.memory.copies import CopyQueue
from tandem_engine.memory.host.blocks import HostBlock, HostBlocks
from tandem_engine.memory.host.events import TierEvents
from tandem_engine.memory.host.pages import HostPages
from tandem_engine.memory.host.traffic import StorageTraffic
from tandem_engine.memory.page_copy import CopyKind, PageCopy
from tandem_engine.messages.kv_events import KvEvent, Tier
from tandem_engine.names import HostPageId, PageId


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

    def left_device(self, digest: bytes) -> bool:
        """The device drops its copy. True if the block can still be found here."""
        block = self.blocks.get(digest)
        if block is None:
            return False
        block.on_device = False
        return not block.loading

    def wanted_soon(self, digest: bytes, tokens: bytes) -> HostBlock | None:
        """The block, begun to be read if only storage has it; None if nobody has it or there is no room."""
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
        """A free page, or one of the block that was not wanted for longest; None if there is neither."""
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
        return block.page

    def _backed_up(self, blocks: Sequence[HostBlock]) -> None:
        if self.traffic is not None:
            self.traffic.store([block for block in blocks if not block.dropped])
        for block in blocks:
            self._unpin(block)

    def _unpin(self, block: HostBlock) -> None:
        freed = self.blocks.unpin(block)
        if freed is not None:
            self.pages.free_cached(freed)
