"""Cached blocks in host memory, by block hash.

Life of a block
    1. add       pinned: a copy from the device or a read from storage fills its page
    2. unpin     filled; it joins the recency list as the most recent
    3. pin       a match wants it, a copy or a write to storage reads it; any number of times
    4. evict     the least recent unpinned block, whether or not the device has it too [mirror-reclaimable]

A hash names a block together with all before it, so a block needs no parent here. Its own tokens are
compared as well: a match goes block by block from the root and has compared those before. A block whose
predecessor is gone cannot be reached, and grows old.

Eviction looks at the head of the recency list only [evict-without-scan], and never touches a pinned block
[pinned-host-block] [copy-acked].
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tandem_engine.messages.kv_events import Tier
from tandem_engine.names import HostPageId


@dataclass(kw_only=True, slots=True, eq=False)
class HostBlock:
    """One page of KV in host memory."""

    digest: bytes
    tokens: bytes
    """Packed."""
    page: HostPageId
    pins: int = 1
    on_device: bool = False
    """The device has it too."""
    loading: bool = False
    """It is being read from storage: its page holds nothing yet."""
    origin: Tier = Tier.DEVICE
    """DISK while nobody has used what was read from there."""
    dropped: bool = False
    """No longer to be found; its page is free when the last pin goes."""


class HostBlocks:
    """An index with recency and pins. Scheduler thread only."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, HostBlock] = {}
        self._unpinned: OrderedDict[HostBlock, None] = OrderedDict()
        self._dropped: set[HostBlock] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[HostBlock]:
        return iter(self._blocks.values())

    @property
    def evictable(self) -> int:
        return len(self._unpinned)

    def get(self, digest: bytes) -> HostBlock | None:
        """The block of this hash, which may still be loading."""
        return self._blocks.get(digest)

    def add(self, block: HostBlock) -> None:
        assert block.digest not in self._blocks, f"block {block.digest.hex()} is in host memory already"
        assert block.pins > 0, "a new block is pinned by what fills it"
        self._blocks[block.digest] = block

    def pin(self, block: HostBlock) -> None:
        """Keep `block` where it is until `unpin`."""
        if block.pins == 0:
            self._unpinned.pop(block)
        block.pins += 1

    def unpin(self, block: HostBlock) -> HostPageId | None:
        """Give a pin back. The page that is free thereby, if the block was dropped meanwhile."""
        assert block.pins > 0, f"block {block.digest.hex()} unpinned twice"
        block.pins -= 1
        if block.pins:
            return None
        if block.dropped:
            self._dropped.remove(block)
            return block.page
        self._unpinned[block] = None
        return None

    def touch(self, block: HostBlock) -> None:
        """`block` is wanted: the most recent now."""
        if block.pins == 0:
            self._unpinned.move_to_end(block)

    def evict(self) -> HostBlock | None:
        """Take out the least recent unpinned block. Its page is the caller's."""
        if not self._unpinned:
            return None
        block, _ = self._unpinned.popitem(last=False)
        del self._blocks[block.digest]
        return block

    def drop(self, block: HostBlock) -> HostPageId | None:
        """Take `block` out. Its page if that is free now, else `unpin` returns it later."""
        del self._blocks[block.digest]
        if block.pins == 0:
            del self._unpinned[block]
            return block.page
        block.dropped = True
        self._dropped.add(block)
        return None

    def pages(self) -> Iterator[HostPageId]:
        """Every page of a block, dropped ones that are still pinned included (audit)."""
        for block in (*self._blocks.values(), *self._dropped):
            yield block.page

    def audit(self) -> list[str]:
        """What is wrong with the bookkeeping; one sentence each."""
        unpinned = {block for block in self._blocks.values() if block.pins == 0}
        if unpinned == self._unpinned.keys():
            return []
        return [f"{len(unpinned)} unpinned host blocks, {len(self._unpinned)} in the recency list"]
