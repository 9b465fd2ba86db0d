"""Which host pages are free, and how many of them the cache may have.

    0 ............... cached blocks ............... | ........ reserve for swapping ........ num_pages

The cache never grows into the reserve. Swapping may use any free page, and has cached blocks evicted when
the reserve is not enough. Whoever gives a page back knows that no copy and no read touches it any more.
"""

from collections.abc import Iterable, Iterator

from tandem_engine.names import HostPageId


class HostPages:
    """The free list of a `HostPool`. Scheduler thread only."""

    def __init__(self, num_pages: int, *, reserve: int = 0) -> None:
        """`reserve`: pages kept for swapped requests."""
        assert 0 <= reserve <= num_pages, f"{reserve} of {num_pages} host pages cannot be reserved"
        self.num_pages = num_pages
        self.reserve = reserve
        self._free = [HostPageId(page) for page in range(num_pages - 1, -1, -1)]
        self._is_free = bytearray(b"\1" * num_pages)
        self._swapped = 0

    @property
    def available(self) -> int:
        """Free pages, the reserve included."""
        return len(self._free)

    @property
    def cache_capacity(self) -> int:
        """Pages that the cache could have if it had all it may."""
        return self.num_pages - self.reserve

    def take_for_cache(self) -> HostPageId | None:
        """A page for a cached block; None when only the reserve is left."""
        if len(self._free) <= max(0, self.reserve - self._swapped):
            return None
        return self._take()

    def take_for_swap(self, n: int) -> list[HostPageId] | None:
        """`n` pages for a swapped request; None, and nothing taken, if fewer are free."""
        if n > len(self._free):
            return None
        self._swapped += n
        return [self._take() for _ in range(n)]

    def free_cached(self, page: HostPageId) -> None:
        self._give_back(page)

    def free_swapped(self, pages: Iterable[HostPageId]) -> None:
        for page in pages:
            self._swapped -= 1
            self._give_back(page)

    def free_page_ids(self) -> Iterator[HostPageId]:
        """Every page that nobody has (audit)."""
        return iter(self._free)

    def _take(self) -> HostPageId:
        page = self._free.pop()
        self._is_free[page] = False
        return page

    def _give_back(self, page: HostPageId) -> None:
        assert not self._is_free[page], f"host page {page} given back while free"
        self._is_free[page] = True
        self._free.append(page)
