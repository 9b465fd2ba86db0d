"""Which pages of the pool are free.

Life of a page
    1. free       on the free list
    2. allocated  a request, the prefix cache or a transfer hold has it; the allocator does not know which
    3. fenced     given back while a step that may write to it is in flight [page-fence]
    4. free       when that step has settled
       in use     by a copy that is on its way: free for what runs after it, but not for a peer (`copies`)

The free list is a stack. The page given back last is given out first: it is the one most likely still
in a processor cache, a pool that is larger than its load never touches the rest of its memory, and a
page used after it was freed is soon somebody else's, which turns that bug into a wrong token in a test
instead of a rare one in service.
"""

from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum

from tandem_engine.errors import OutOfPagesError
from tandem_engine.memory.copies import CopyFence, CopyQueue
from tandem_engine.memory.fence import StepFence
from tandem_engine.names import DUMMY_PAGE, PageId


class PageState(IntEnum):
    FREE = 0
    ALLOCATED = 1
    FENCED = 2
    RESERVED = 3
    """The dummy page: never given out, so never given back either."""


class Writer(Enum):
    """Who fills the pages that are asked for."""

    STREAM = "stream"
    """Forwards and copies, which run in launch order."""
    PEER = "peer"
    """Anybody else, at any time: no copy in flight may touch its pages [page-fence]."""


class PageAllocator:
    """Pages 1..num_pages-1; page 0 is the dummy page [dummy-page]. Scheduler thread only."""

    def __init__(self, num_pages: int, copies: CopyQueue | None = None) -> None:
        """`copies`: what else touches pages on the device; None if nothing does."""
        self.num_pages = num_pages
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
        """Give pages back; nobody gets them before `step` has settled."""
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
        """Every page that nobody holds, fenced ones included (audit)."""
        yield from self._free
        yield from self._fence
        if self._copied is not None:
            yield from self._copied

    def _set_free(self, pages: list[PageId]) -> None:
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
