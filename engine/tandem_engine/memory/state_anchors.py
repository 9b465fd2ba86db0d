"""Anchors: copies of states at whole blocks of the prefix cache, from which other requests continue.

A state is that of one length. So a cached prefix can be continued from where such a copy was made, and nowhere between.
An anchor belongs to the page id of the block that ends at its length, and lies in a slot of the state pool behind those
of requests.

    1. pending   a step is launched that copies a request's state, and has not settled; or the tree lacks the page
    2. attached  the tree has it: other requests may continue here. One page has one anchor
    3. pinned    a request was given the prefix, and its first step is not launched yet
    4. free      the tree dropped the page, or another anchor needs the slot: the one used longest ago, if not pinned

Copies and steps run in the order of launches: a slot may be given away as soon as the step that reads it is launched.

Lengths are multiples of `grain`, a whole number of blocks and of chunks of the delta rule: a copy in the middle of a
prompt then leaves the bits of its state as they are.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import lcm

from tandem_engine.base.names import PageId

CHUNK = 64
"""Tokens (`model.layers.delta_rule`)."""


class StateAnchors:
    """Scheduler thread only."""

    def __init__(self, slots: Sequence[int], *, page_size: int) -> None:
        """`slots` of the state pool that no request has."""
        self.grain = lcm(page_size, CHUNK)
        self._page_size = page_size
        self._slots = tuple(slots)
        self._free = [*reversed(slots)]
        self._slot_of: OrderedDict[PageId, int] = OrderedDict()
        self._pins: Counter[PageId] = Counter()
        self._changes: list[tuple[PageId, bool]] = []
        self.losing: Callable[[PageId, int], None] | None = None
        """Called with the page of an anchor and its slot, before another anchor gets the slot."""

    def at_most(self, tokens: int) -> int:
        """The longest length of an anchor within so many tokens."""
        return tokens // self.grain * self.grain

    def usable_blocks(self, pages: Sequence[PageId]) -> int:
        """The most leading blocks of a cached path, on `pages`, that end at an anchor."""
        step = self.grain // self._page_size
        for blocks in range(len(pages) // step * step, 0, -step):
            if pages[blocks - 1] in self._slot_of:
                return blocks
        return 0

    def slot_of(self, page: PageId) -> int | None:
        """Of the anchor at the end of `page`; None if there is none."""
        return self._slot_of.get(page)

    def pin(self, page: PageId) -> None:
        """A request continues from the anchor of `page`. It counts as used now."""
        self._slot_of.move_to_end(page)
        self._pins[page] += 1

    def unpin(self, page: PageId) -> int:
        """Its first step is launched, or it will have none. Returns the slot."""
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
        return self._slot_of[page]

    def take(self) -> int | None:
        """A slot for a pending anchor; None if all are pending or pinned."""
        if not self._free:
            oldest = next((page for page in self._slot_of if page not in self._pins), None)
            if oldest is None:
                return None
            if self.losing is not None:
                self.losing(oldest, self._slot_of[oldest])
            self._free.append(self._slot_of.pop(oldest))
            self._changes.append((oldest, False))
        return self._free.pop()

    def attach(self, page: PageId, slot: int) -> None:
        """The tree has `page`, at whose end the state in `slot` is."""
        if page in self._slot_of:
            self.give_back(slot)
            self._slot_of.move_to_end(page)
        else:
            self._slot_of[page] = slot
            self._changes.append((page, True))

    def give_back(self, slot: int) -> None:
        """A pending anchor comes to nothing."""
        self._free.append(slot)

    def drop(self, pages: Iterable[PageId]) -> None:
        """`pages` are free. Those without an anchor are ignored."""
        if not self._slot_of:
            return
        for page in pages:
            slot = self._slot_of.pop(page, None)
            if slot is not None:
                assert page not in self._pins, f"page {page} is freed and a request continues from its anchor"
                self._free.append(slot)
                self._changes.append((page, False))

    def take_changes(self) -> list[tuple[PageId, bool]]:
        """Pages that have got an anchor (True) or lost it since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken

    def problems(self, *, tree: Iterable[PageId], pending: Sequence[int], pins: Counter[PageId]) -> list[str]:
        """What is wrong if requests have these `pending` slots and `pins`, and the cache these pages (audit)."""
        checks = {
            "slots with one owner": (sorted([*self._free, *self._slot_of.values(), *pending]), sorted(self._slots)),
            "anchors outside the tree": ({*self._slot_of} - {*tree}, set()),
            "pinned anchors": (self._pins, pins),
        }
        return [
            f"states: {what} are {found}, expected {expected}"
            for what, (found, expected) in checks.items()
            if found != expected
        ]
