"""A cached prefix that is pinned for a user other than a request, which reads it or appends pages to it.

1. borrowed   locked on the device; its continuation in host memory is copied to the device first
2. over       released unchanged, spent if it has migrated elsewhere, or extended by pages with the tokens after it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.base.names import PageId
from tandem_engine.memory.kv_memory import KvMemory, Pin
from tandem_engine.memory.prefix_cache import NoPrefixCache
from tandem_engine.messages.kv_events import CacheSpace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BorrowedPrefix:
    """Pages of the tree that hold the first `len(pages) * page_size` tokens of the requested sequence."""

    memory: KvMemory
    pin: Pin
    pages: tuple[PageId, ...]
    """In token order."""
    copy: int
    """The newest copy that may still fill one of them."""

    @staticmethod
    def of(memory: KvMemory, token_ids: Sequence[int], *, space: CacheSpace, spare_pages: int) -> "BorrowedPrefix":
        """The longest prefix of `token_ids` that is cached; with host memory's part if that fits in `spare_pages`."""
        match = memory.cache.match(token_ids, space=space)
        lock, pages, copy = match.lock, match.pages, memory.copies.newest_load
        if match.slower is not None:
            missing = match.slower.num_pages
            room = memory.reserve_pages(missing) if 0 < missing <= spare_pages else None
            if room is None:
                match.slower.release()
            else:
                match.slower.load(room)
                copy = memory.copies.launched
                start, stop = len(pages) * memory.page_size, (len(pages) + missing) * memory.page_size
                inserted = memory.cache.extend(lock, token_ids[start:stop], room)
                memory.give_back(inserted.duplicates)
                lock, pages = inserted.lock, (*pages, *inserted.pages)
        pin = Pin(lock=lock, pages=len(pages))
        memory.pins.append(pin)
        return BorrowedPrefix(memory=memory, pin=pin, pages=pages, copy=copy)

    @property
    def tokens(self) -> int:
        return len(self.pages) * self.memory.page_size

    @property
    def readable(self) -> bool:
        """Whether every page is filled for a reader outside the executor's order, too [settled-only-sent]."""
        return self.memory.copies.passed(self.copy)

    def give_back(self, *, spent: bool = False) -> None:
        """Let eviction have the pages again. Once, and not after `extend`. `spent` as of `PrefixCache.unlock`."""
        self.memory.unpin(self.pin, spent=spent)

    def extend(self, token_ids: Sequence[int], pages: Sequence[PageId]) -> None:
        """Have the cache adopt `pages`, which hold `token_ids` after this prefix, and give back the prefix.

        What the cache has in other pages by now goes back to the free list.
        """
        self.memory.pins.remove(self.pin)
        inserted = self.memory.cache.extend(self.pin.lock, token_ids, pages)
        self.memory.cache.unlock(inserted.lock)
        adopted = {*inserted.pages}
        self.memory.give_back([page for page in pages if page not in adopted])


def fetches_prefixes(memory: KvMemory) -> bool:
    """Whether a prefix that is received can be found again, and be continued from its pages alone."""
    return not memory.stateful and not isinstance(memory.cache, NoPrefixCache)
