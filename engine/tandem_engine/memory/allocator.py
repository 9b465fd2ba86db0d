"""Which pages and rows of the pool are free, and which wait for a step in flight.

`PageAllocator`: life of a page
    1. free       on the free list
    2. allocated  owned by a request, the prefix cache or a transfer hold; the allocator does not track which
    3. fenced     released while a step that may write to it is in flight [page-fence]
    4. free       when that step has completed
       in use     by a copy in flight: free for what runs after the copy, but not for a peer (`page_copies`)

The free list is a stack, so the page released last is allocated first. It is the most likely to be in a processor
cache, and a pool larger than its load never touches the rest of its memory. A page that is used after its release soon
belongs to another request, so that such a bug gives a wrong token in a test and not a rare one in service.

`StepFence` keeps what a step in flight may still write to. A request that ends while step N+1 is in flight may have one
token of that step written into its pages. The next forward runs after it on the same stream, but a page that is filled
by a peer could be overwritten [page-fence]. So a release names the newest step launched with the memory.

`ReqToTokenPool` has the rows, which name the pages of each request in token order, without gaps. A row is zeroed when
it is released (`free`, or `free_after` a step), not when it is allocated: after the last entry written, every row names
only the dummy page at any moment. The device reads a snapshot in the `ForwardBatch`, so the table may change during a
forward. A running forward still uses the row *number*, as its place in the FutureMap: hence the fence.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum, IntEnum
from typing import Generic, Protocol, TypeVar

import torch

from tandem_engine.base.errors import OutOfPagesError
from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW, PageId, ReqPoolIdx
from tandem_engine.memory.page_copies import CopyFence, CopyQueue

Item = TypeVar("Item")


class StepFence(Generic[Item]):
    """Items by the step they wait for. Hardly ever more than two steps at a time."""

    def __init__(self) -> None:
        self._last_settled = -1
        self._waiting: dict[int, list[Item]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def __iter__(self) -> Iterator[Item]:
        for items in self._waiting.values():
            yield from items

    def passed(self, step: int) -> bool:
        """Whether `step` has settled: nothing needs to wait for it."""
        return step <= self._last_settled

    def hold(self, step: int, items: Iterable[Item]) -> None:
        """Keep `items` until `step` or a later one settles."""
        assert not self.passed(step), f"step {step} settled already, last settled is {self._last_settled}"
        self._waiting.setdefault(step, []).extend(items)

    def settled(self, step: int) -> list[Item]:
        """Steps settle in order, so `step` stands for all before it. Returns what need not wait any more."""
        self._last_settled = max(self._last_settled, step)
        due = [waiting for waiting in self._waiting if self.passed(waiting)]
        return [item for waiting in due for item in self._waiting.pop(waiting)]


class PageState(IntEnum):
    FREE = 0
    ALLOCATED = 1
    FENCED = 2
    RESERVED = 3
    """The dummy page: never given out, so never given back either."""


class Writer(Enum):
    """The writer of the requested pages."""

    STREAM = "stream"
    """Forwards and copies, which run in launch order."""
    PEER = "peer"
    """Any other writer, at any time: no copy in flight may touch its pages [page-fence]."""


class DropsPages(Protocol):
    """Keeps something for page ids."""

    def drop(self, pages: Iterable[PageId]) -> None:
        """`pages` are free."""
        ...


class PageAllocator:
    """Pages 1..num_pages-1; page 0 is the dummy page [dummy-page]. Scheduler thread only."""

    def __init__(self, num_pages: int, copies: CopyQueue | None = None, windows: Sequence[DropsPages] = ()) -> None:
        """`copies`: what else touches pages on the device; None if nothing does. `windows`, or anchors of states, drop
        what is free."""
        self.num_pages = num_pages
        self.windows = windows
        self._free = [PageId(page) for page in range(num_pages - 1, DUMMY_PAGE, -1)]
        self._state = bytearray(num_pages)
        self._state[DUMMY_PAGE] = PageState.RESERVED
        self._fence: StepFence[PageId] = StepFence()
        self._copied: CopyFence[PageId] | None = None if copies is None else CopyFence(copies=copies)

    @property
    def available(self) -> int:
        """Pages that `alloc` can give to the stream now; fenced ones do not count."""
        return len(self._free) + (len(self._copied) if self._copied is not None else 0)

    @property
    def fenced_pages(self) -> int:
        """Pages waiting for a step to settle."""
        return len(self._fence)

    def available_to(self, writer: Writer) -> int:
        """Pages that `alloc` can give to `writer` now."""
        if writer is Writer.STREAM:
            return self.available
        if self._copied is not None:
            self._free += self._copied.passed()
        return len(self._free)

    def alloc(self, n: int, writer: Writer = Writer.STREAM) -> list[PageId]:
        """`n` pages with undefined content. Raises OutOfPagesError and takes nothing if there are fewer."""
        available = self.available_to(writer)
        if n > available:
            raise OutOfPagesError(
                f"{n} KV pages are required and {available} of {self.num_pages - 1} are free "
                f"({self.fenced_pages} more are waiting for a step to complete)"
            )
        if n > len(self._free) and self._copied is not None:
            self._free += self._copied.take(n - len(self._free))
        cut = len(self._free) - n
        pages = self._free[cut:]
        del self._free[cut:]
        for page in pages:
            self._state[page] = PageState.ALLOCATED
        return pages

    def free(self, pages: Iterable[PageId]) -> None:
        """Give pages back. A page that is not allocated raises AssertionError with its id."""
        self._set_free(self._give_back(pages, PageState.FREE))

    def free_after(self, step: int, pages: Iterable[PageId]) -> None:
        """Release pages; they are not allocated again before `step` has settled."""
        if self._fence.passed(step):
            self.free(pages)
        else:
            self._fence.hold(step, self._give_back(pages, PageState.FENCED))

    def settled(self, step: int) -> None:
        """`step` and all before it have settled: nothing in flight writes to what waited for them."""
        due = self._fence.settled(step)
        for page in due:
            self._state[page] = PageState.FREE
        self._set_free(due)

    def free_page_ids(self) -> Iterator[PageId]:
        """Every page without an owner, fenced ones included (audit)."""
        yield from self._free
        yield from self._fence
        if self._copied is not None:
            yield from self._copied

    def _set_free(self, pages: list[PageId]) -> None:
        for window in self.windows:
            window.drop(pages)
        if self._copied is not None and self._copied.needed:
            self._copied.hold(pages)
        else:
            self._free += pages

    def _give_back(self, pages: Iterable[PageId], state: PageState) -> list[PageId]:
        returned = []
        for page in pages:
            assert page >= 0, f"page {page} is a sentinel, not a page"
            found = PageState(self._state[page])
            assert found is PageState.ALLOCATED, f"page {page} given back while {found.name.lower()}"
            self._state[page] = state
            returned.append(page)
        return returned


class ReqToTokenPool:
    """Rows 1..max_rows for requests; row 0 is padding and stays zero. Scheduler thread only."""

    table: torch.Tensor
    """[max_rows + 1, max_pages] int32 page ids on the CPU; 0, the dummy page, where nothing was written."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        """`max_pages` bounds the pages of one request: its longest sequence, the overshoot token included."""
        self.max_rows = max_rows
        self.max_pages = max_pages
        self.table = torch.zeros(max_rows + 1, max_pages, dtype=torch.int32)
        # Shares memory with the table; assigning a short list is several times cheaper than through torch.
        self._entries = self.table.numpy()
        self._written = [0] * (max_rows + 1)
        self._in_use = bytearray(max_rows + 1)
        self._free = [ReqPoolIdx(row) for row in range(max_rows, PADDING_ROW, -1)]
        self._fence: StepFence[ReqPoolIdx] = StepFence()

    @property
    def available(self) -> int:
        """Rows that can be given out now."""
        return len(self._free)

    def alloc(self) -> ReqPoolIdx | None:
        """A zeroed row, or None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use[row] = True
        return row

    def write(self, row: ReqPoolIdx, first_page_index: int, pages: Sequence[PageId]) -> None:
        """Set entries [first_page_index, first_page_index + len(pages)) of `row`."""
        end = first_page_index + len(pages)
        assert self._in_use[row], f"row {row} is free and cannot be written"
        assert first_page_index <= self._written[row], (
            f"row {row} has {self._written[row]} pages; writing at {first_page_index} leaves a gap"
        )
        assert end <= self.max_pages, f"row {row} would need {end} pages and a row holds {self.max_pages}"
        self._entries[row, first_page_index:end] = pages
        self._written[row] = max(self._written[row], end)

    def free(self, row: ReqPoolIdx) -> None:
        """Give `row` back. A second time is a bug and raises AssertionError."""
        self._retire(row)
        self._free.append(row)

    def free_after(self, step: int, row: ReqPoolIdx) -> None:
        """Release `row`; it is not allocated again before `step` has settled."""
        self._retire(row)
        if self._fence.passed(step):
            self._free.append(row)
        else:
            self._fence.hold(step, (row,))

    def settled(self, step: int) -> None:
        """`step` and all before it have settled."""
        self._free += self._fence.settled(step)

    def in_use(self) -> Iterator[ReqPoolIdx]:
        """Every row that a request has (audit)."""
        return (ReqPoolIdx(row) for row, used in enumerate(self._in_use) if used)

    def _retire(self, row: ReqPoolIdx) -> None:
        assert self._in_use[row], f"row {row} freed twice, or never given out"
        self._in_use[row] = False
        self._entries[row, : self._written[row]] = 0
        self._written[row] = 0


def each_once(sets: Collection[Sequence[int]], num_pages: int) -> bool:
    """Whether each of so many pages is in one of `sets` once, and nothing else is (audit).

    There may be millions, and to count each takes ten times as long.
    """
    pages = set[int]().union(*sets)
    once = len(pages) == sum(map(len, sets)) == num_pages
    return once and min(pages, default=0) == 0 and max(pages, default=-1) == num_pages - 1
