"""Anchors: copies of states at whole blocks of the prefix cache, from which other requests continue.

A state is that of one length. So a cached prefix can be continued from where such a copy was made, and nowhere between
[state-at-its-length]. An anchor belongs to the page id of the block that ends at its length, and lies in a slot of the
state pool after those of requests.

    1. pending   a step is launched that copies a request's state, and has not settled; or the tree lacks the page
    2. attached  the tree has it: other requests may continue here. One page has one anchor
    3. pinned    a request was given the prefix, and its first step is not launched yet
    4. free      the tree dropped the page, or another anchor needs the slot: the one used longest ago, if not pinned

An anchor is provisional where a prompt is cut only in case another one leaves it there. Provisional anchors give up
slots first, the oldest first, also to each other, and take none of another anchor. One from which a step has continued,
or which a peer has read, is no longer provisional; a request that is not admitted leaves it so. Steps in flight may
fill a quarter of the slots with them at most, so others always have some.

Copies and steps run in the order of launches: a slot may be given away as soon as the step that reads it is launched.

Lengths are multiples of `grain`, a whole number of blocks and of chunks of the delta rule: a copy in the middle of a
prompt then leaves the bits of its state as they are [chunks-keep-bits].
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import lcm
from typing import NamedTuple

from tandem_engine.base.names import PageId
from tandem_engine.memory.cache_groups import STATE_CHUNK

PENDING_SHARE = 4
"""One slot of so many may be pending for a provisional anchor."""


class AnchorCounts(NamedTuple):
    """Slots of anchors by what they hold; what is pending is in `slots` alone."""

    slots: int
    slot_bytes: int
    kept: int
    provisional: int
    replaced: int
    """Anchors that gave their slot to another one, so far."""


class StateAnchors:
    """Scheduler thread only."""

    def __init__(self, slots: Sequence[int], *, page_size: int, slot_bytes: int, trials: bool = True) -> None:
        """`slots` of the state pool that no request has. Without `trials` no anchor is provisional."""
        self.grain = lcm(page_size, STATE_CHUNK)
        self._page_size = page_size
        self._slots = tuple(slots)
        self._slot_bytes = slot_bytes
        self._free = [*reversed(slots)]
        self._slot_of: OrderedDict[PageId, int] = OrderedDict()
        self._trials: OrderedDict[PageId, None] = OrderedDict()
        """The provisional ones."""
        self._pending_trials: set[int] = set()
        self._most_pending_trials = len(slots) // PENDING_SHARE if trials else 0
        self._replaced = 0
        self._pins: Counter[PageId] = Counter()
        self._changes: list[tuple[PageId, bool]] = []
        self.losing: Callable[[PageId, int], None] | None = None
        """Called with the page of an anchor, not a provisional one, and its slot, before another anchor gets the
        slot."""
        self.keeping: Callable[[PageId], None] | None = None
        """Called with the page of an anchor that is no longer provisional."""

    def at_most(self, tokens: int) -> int:
        """The longest length of an anchor within so many tokens, all of them included [whole-grain-hit]."""
        return tokens // self.grain * self.grain

    def usable_blocks(self, pages: Sequence[PageId], *, trials: bool = True) -> int:
        """The most leading blocks of a cached path, on `pages`, that end at an anchor; without `trials` at one that is
        not provisional."""
        step = self.grain // self._page_size
        for blocks in range(len(pages) // step * step, 0, -step):
            page = pages[blocks - 1]
            if page in self._slot_of and (trials or page not in self._trials):
                return blocks
        return 0

    def slot_of(self, page: PageId) -> int | None:
        """Of the anchor at the end of `page`; None if there is none."""
        return self._slot_of.get(page)

    def pin(self, page: PageId) -> None:
        """A request is to continue from the anchor of `page`, or a peer reads it. It counts as used now."""
        self._slot_of.move_to_end(page)
        self._pins[page] += 1

    def unpin(self, page: PageId, *, used: bool) -> int:
        """Its first step is launched, or the peer has read it, and it is no longer provisional; or it was not `used`.
        Returns the slot."""
        if used and page in self._trials:
            self._keep(page)
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
        return self._slot_of[page]

    def take(self, *, provisional: bool = False) -> int | None:
        """A slot for a pending anchor; None if all are pending or pinned. `provisional`: none of another anchor."""
        if provisional and len(self._pending_trials) >= self._most_pending_trials:
            return None
        if not self._free:
            oldest = self._to_replace(provisional=provisional)
            if oldest is None:
                return None
            if self.losing is not None and oldest not in self._trials:
                self.losing(oldest, self._slot_of[oldest])
            self._free_slot_of(oldest)
            self._replaced += 1
        slot = self._free.pop()
        if provisional:
            self._pending_trials.add(slot)
        return slot

    def attach(self, page: PageId, slot: int) -> None:
        """The tree has `page`, at whose end the state in `slot` is."""
        provisional = slot in self._pending_trials
        if page in self._slot_of:
            self.give_back(slot)
            self._slot_of.move_to_end(page)
            if page in self._trials and not provisional:
                self._keep(page)
            return
        self._pending_trials.discard(slot)
        self._slot_of[page] = slot
        if provisional:
            self._trials[page] = None
        self._changes.append((page, True))

    def give_back(self, slot: int) -> None:
        """A pending anchor comes to nothing."""
        self._pending_trials.discard(slot)
        self._free.append(slot)

    def is_provisional(self, page: PageId) -> bool:
        """Whether the anchor at the end of `page` is."""
        return page in self._trials

    @property
    def counts(self) -> AnchorCounts:
        """What the slots hold now."""
        provisional = len(self._trials)
        return AnchorCounts(
            slots=len(self._slots),
            slot_bytes=self._slot_bytes,
            kept=len(self._slot_of) - provisional,
            provisional=provisional,
            replaced=self._replaced,
        )

    def drop(self, pages: Iterable[PageId]) -> None:
        """`pages` are free, and so are the slots of their anchors [anchor-with-its-page]. Others are ignored."""
        if not self._slot_of:
            return
        for page in pages:
            if page in self._slot_of:
                assert page not in self._pins, f"page {page} is freed and a request continues from its anchor"
                self._free_slot_of(page)

    def take_changes(self) -> list[tuple[PageId, bool]]:
        """Pages that have got an anchor (True) or lost it since the last call, in order."""
        taken, self._changes = self._changes, []
        return taken

    def problems(self, *, tree: Iterable[PageId], pending: Sequence[int], pins: Counter[PageId]) -> list[str]:
        """What is wrong if requests have these `pending` slots and `pins`, and the cache these pages (audit)."""
        checks = {
            "slots with one owner": (sorted([*self._free, *self._slot_of.values(), *pending]), sorted(self._slots)),
            "anchors outside the tree": ({*self._slot_of} - {*tree}, set()),
            "trials that are no anchors": ({*self._trials} - {*self._slot_of}, set()),
            "pending trials that no request has": (self._pending_trials - {*pending}, set()),
            "pinned anchors": (self._pins, pins),
        }
        return [
            f"states: {what} are {found}, expected {expected}"
            for what, (found, expected) in checks.items()
            if found != expected
        ]

    def _to_replace(self, *, provisional: bool) -> PageId | None:
        """The page of the anchor that gives its slot to another one, which is `provisional` or not."""
        trial = next((page for page in self._trials if page not in self._pins), None)
        if trial is not None or provisional:
            return trial
        return next((page for page in self._slot_of if page not in self._pins), None)

    def _keep(self, page: PageId) -> None:
        """The anchor of `page` is no longer provisional."""
        del self._trials[page]
        if self.keeping is not None:
            self.keeping(page)

    def _free_slot_of(self, page: PageId) -> None:
        self._free.append(self._slot_of.pop(page))
        self._trials.pop(page, None)
        self._changes.append((page, False))
