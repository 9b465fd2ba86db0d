"""A cached prefix that is pinned for a user other than a request, which reads it or appends pages to it.

1. pinned     locked on the device; its continuation in host memory is copied to the device first
2. over       released unchanged, spent if it has migrated elsewhere, or extended by pages with the tokens after it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.memory.kv_memory import KvMemory, Pin
from tandem_engine.memory.prefix_cache import NoPrefixCache
from tandem_engine.messages.kv_events import CacheSpace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PinnedPrefix:
    """Pages of the tree that hold the first `len(pages) * page_size` tokens of the requested sequence."""

    memory: KvMemory
    pin: Pin
    pages: tuple[PageId, ...]
    """In token order."""
    copy: int
    """The newest copy that may still fill one of them."""

    @staticmethod
    def of(
        memory: KvMemory, token_ids: Sequence[int], *, space: CacheSpace, spare_pages: int, with_state: bool = False
    ) -> "PinnedPrefix":
        """The longest prefix of `token_ids` that is cached; with host memory's part if that fits in `spare_pages`.

        `with_state`: and whose state is at an anchor on the device, where layers keep states. It is pinned there.
        """
        match = memory.cache.match(token_ids, space=space)
        lock, pages, copy = match.lock, match.pages, memory.copies.newest_load
        with_state = with_state and memory.anchors is not None
        if match.slower is not None:
            missing = match.slower.num_pages
            has_state = with_state and match.slower.has_state
            room = memory.reserve_pages(missing) if missing <= spare_pages and (missing or has_state) else None
            landing = memory.reserve_state() if has_state and room is not None else None
            if room is None or (has_state and landing is None):
                match.slower.release()
                memory.give_back(room or ())
                pages = () if has_state else pages
            else:
                # Until another request needs the slot: copies to it run before whatever reads it.
                match.slower.load(room, None if landing is None else ReqPoolIdx(landing[0]))
                copy = memory.copies.launched
                start, stop = len(pages) * memory.page_size, (len(pages) + missing) * memory.page_size
                inserted = memory.cache.extend(lock, token_ids[start:stop], room)
                memory.give_back(inserted.duplicates)
                lock, pages = inserted.lock, (*pages, *inserted.pages)
                if landing is not None:
                    memory.attach_state(pages[-1], landing[0])
        pin = Pin(lock=lock, pages=len(pages), anchor=_pinned(memory, pages) if with_state and pages else None)
        memory.pins.append(pin)
        return PinnedPrefix(memory=memory, pin=pin, pages=pages, copy=copy)

    @property
    def state(self) -> PageId:
        """The slot of its state. Only of one `with_state`."""
        assert self.pin.anchor is not None, "a prefix without a state"
        assert self.memory.anchors is not None, "an anchor where there are none"
        slot = self.memory.anchors.slot_of(self.pin.anchor)
        assert slot is not None, f"the pinned anchor of page {self.pin.anchor} is gone"
        return PageId(slot)

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

    def extend(self, token_ids: Sequence[int], pages: Sequence[PageId], *, state: int | None = None) -> None:
        """Have the cache adopt `pages`, which hold `token_ids` after this prefix, and give back the prefix.

        What the cache has in other pages by now goes back to the free list. `state`: slot of the state after them.
        """
        assert self.pin.anchor is None, "a prefix that is extended continues at no anchor"
        self.memory.pins.remove(self.pin)
        inserted = self.memory.cache.extend(self.pin.lock, token_ids, pages)
        if state is not None:
            self.memory.attach_state(inserted.pages[-1], state)
        self.memory.cache.unlock(inserted.lock)
        adopted = {*inserted.pages}
        self.memory.give_back([page for page in pages if page not in adopted])


def _pinned(memory: KvMemory, pages: Sequence[PageId]) -> PageId:
    assert memory.anchors is not None, "an anchor where there are none"
    memory.anchors.pin(pages[-1])
    return pages[-1]


def fetches_prefixes(memory: KvMemory) -> bool:
    """Whether a prefix that is received can be found again."""
    return not isinstance(memory.cache, NoPrefixCache)
