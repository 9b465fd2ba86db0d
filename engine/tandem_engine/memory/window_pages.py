"""Pages of the layers that see a window of tokens.

A page id names a block of tokens in all groups of layers (`cache_groups`). For layers that read all tokens it is also
where their K and V lie. Layers with a window have pages of their own, fewer of them, and `WindowPages.page_of` has the
one that belongs to a page id:

    page id      5   9   2   7   3      of a request, in token order; as in a model without windows
    page_of      0   0   4   1   8      0: the window has passed this block, and its page serves another one

So the free list, the tree, rows and locks keep page ids, and know of windows only how far a cached prefix can be
continued: `usable_blocks`.

    1. attached   with a page id that the allocator gives out: the block is to be computed
    2. used       by requests whose window reaches it. Private pages have one user; those of the tree are counted
    3. passed     no user reads it any more: a private one is free at once, one of the tree when memory is short
       idle       its last user ended: it is where a conversation continues, and is kept longer
    4. dropped    free; the page id stays and has a hole here

A step in flight reads from its first token on, less its window, and pages are passed by what was committed before it:
no step, however late it runs, reads a page that was passed while it was in flight [page-fence]
[window-page-in-use].
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.base.names import DUMMY_PAGE, PageId
from tandem_engine.forward.batch import GroupPages
from tandem_engine.memory.cache_groups import Reach


class WindowPages:
    """Of one group. Scheduler thread only."""

    page_of: npt.NDArray[np.int32]
    """[page ids] pages of this group; 0, its dummy page, where a block has none."""

    def __init__(
        self,
        reach: Reach,
        *,
        page_size: int,
        num_pages: int,
        page_ids: int,
        dropped: Callable[[Sequence[int]], object] = lambda _: None,
    ) -> None:
        """`num_pages` of this group, the dummy one included. `dropped` is called with pages that nothing reads."""
        assert reach.span is not None, "layers that read all tokens need a page for each page id"
        self.reach = reach
        self.num_pages = num_pages
        self.page_of = np.zeros(page_ids, np.int32)
        self.page_size = page_size
        self._free = [*range(num_pages - 1, DUMMY_PAGE, -1)]
        self._users: Counter[PageId] = Counter()
        self._passed: OrderedDict[PageId, None] = OrderedDict()
        self._idle: OrderedDict[PageId, None] = OrderedDict()
        self._dropped = dropped

    @property
    def available(self) -> int:
        """Pages that `make_room` can provide."""
        return len(self._free) + len(self._passed) + len(self._idle)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def passed_blocks(self, tokens: int) -> int:
        """Leading blocks that nothing reads after the first `tokens`."""
        return self.reach.passed_blocks(tokens, self.page_size)

    def blocks_for(self, blocks: int) -> int:
        """Pages that a sequence of `blocks` needs while it decodes."""
        limit = self.reach.max_blocks(self.page_size)
        return blocks if limit is None else min(blocks, limit)

    def located(self, page_table: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]) -> GroupPages:
        """Where this group has the pages and slots of a step; copied, as it changes while the step runs.

        The table stays indexed by block of the sequence; its values alone are those of the group
        [window-table-by-block].
        """
        pages = self.page_of[slots // self.page_size].astype(np.int64)
        return GroupPages(
            page_table=torch.from_numpy(self.page_of[page_table]),
            out_cache_loc=torch.from_numpy(pages * self.page_size + slots % self.page_size),
        )

    def make_room(self, n: int, evict: Callable[[int], int]) -> None:
        """Have `n` free pages, at most `available`. `evict` drops the ends of cached paths and returns how many pages.

        First goes what a window has passed, then whole ends of conversations: a range is not left with a hole while
        there is another way.
        """
        assert n <= self.available, f"{n} pages of a window are required and {self.available} are available"
        while len(self._free) < n and self._passed:
            self.drop([next(iter(self._passed))])
        while len(self._free) < n and evict(n - len(self._free)):
            pass
        while len(self._free) < n:
            self.drop([next(iter(self._idle))])

    def attach(self, pages: Sequence[PageId]) -> None:
        """Give a page of this group to each of `pages`, which are to be computed."""
        cut = len(self._free) - len(pages)
        assert cut >= 0, f"{len(pages)} pages of a window are required and {len(self._free)} are free"
        assert not self.page_of[[*pages]].any(), f"some of {pages[:4]} have a page of this window"
        self.page_of[[*pages]] = self._free[cut:]
        del self._free[cut:]

    def drop(self, pages: Iterable[PageId]) -> None:
        """Nothing reads `pages` any more; those without a page here are ignored."""
        freed = []
        for page in pages:
            here = int(self.page_of[page])
            if here == DUMMY_PAGE:
                continue
            assert page not in self._users, f"page {page} is dropped while {self._users[page]} requests read it"
            self._passed.pop(page, None)
            self._idle.pop(page, None)
            self.page_of[page] = DUMMY_PAGE
            freed.append(here)
        if freed:
            self._dropped(freed)
            self._free += freed

    def use(self, pages: Iterable[PageId]) -> None:
        """A request, or a pin, has these pages of the tree in its window."""
        for page in pages:
            assert self.page_of[page] != DUMMY_PAGE, f"page {page} is used and the window has passed it"
            self._users[page] += 1
            self._passed.pop(page, None)
            self._idle.pop(page, None)

    def pass_by(self, pages: Iterable[PageId]) -> None:
        """The window of a user of these pages of the tree has passed them."""
        self._release(pages, self._passed)

    def leave(self, pages: Iterable[PageId]) -> None:
        """A user of these pages of the tree has ended."""
        self._release(pages, self._idle)

    def fill(self, hole: PageId, page: PageId) -> None:
        """Both hold the same tokens, `hole` in the tree: it takes over the page of the other if it has none.

        One of the two has the page afterwards, so it is freed once [window-page-once].
        """
        if self.page_of[hole] == DUMMY_PAGE:
            self.page_of[hole], self.page_of[page] = self.page_of[page], DUMMY_PAGE

    def intact(self, pages: npt.NDArray[np.int64]) -> int:
        """The most leading blocks of `pages`, of one path, after which a request can continue."""
        blocks = np.arange(1, len(pages) + 1)
        holes = np.where(self.page_of[pages] == DUMMY_PAGE, blocks, 0)
        broken = np.maximum.accumulate(holes)
        """Blocks up to the last hole, of each number of leading blocks."""
        first = self.reach.first_reads(blocks * self.page_size) // self.page_size
        fitting = np.flatnonzero(broken <= first)
        return 0 if len(fitting) == 0 else int(fitting[-1]) + 1

    def problems(
        self, *, tree: Iterable[PageId], needed: Sequence[PageId], pending: Iterable[PageId], users: Counter[PageId]
    ) -> list[str]:
        """What is wrong if page ids outside the `tree`, which has these `users`, are `needed` or `pending` (audit)."""
        attached = {*np.flatnonzero(self.page_of).tolist()}
        cached = {*tree} & attached
        unused = cached - users.keys()
        checks = {
            "pages with one owner": (
                sorted([*self._free, *self.page_of[self.page_of != DUMMY_PAGE].tolist()]),
                [*range(1, self.num_pages)],
            ),
            "page ids with a page and no owner": (attached - cached - {*needed} - {*pending}, set()),
            "page ids that are read and have no page": ({*needed, *users} - attached, set()),
            "users of cached pages": (self._users, users),
            "cached pages without a user": (sorted([*self._passed, *self._idle]), sorted(unused)),
        }
        return [
            f"window of {self.reach.span}: {what} are {found}, expected {expected}"
            for what, (found, expected) in checks.items()
            if found != expected
        ]

    def _release(self, pages: Iterable[PageId], unused: OrderedDict[PageId, None]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                del self._users[page]
                unused[page] = None


def usable_blocks(windows: Sequence[WindowPages], pages: Sequence[PageId]) -> int:
    """The most leading blocks of a cached path, on `pages`, after which all windows can continue."""
    path = np.array(pages, np.int64)
    before = -1
    while before != len(path):
        before = len(path)
        for window in windows:
            path = path[: window.intact(path)]
    return len(path)
