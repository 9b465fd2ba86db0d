import resource
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.memory.host.memory import page_problems
from tandem_engine.memory.host.pages import HostPages, HostPool


def test_cache_never_grows_into_the_reserve():
    pages = HostPages(5, reserve=2)
    taken = [pages.take_for_cache() for _ in range(4)]
    assert None not in taken[:3]
    assert taken[3] is None
    assert pages.available == 2
    assert pages.cache_capacity == 3


def test_swap_uses_free_pages_beyond_its_reserve():
    pages = HostPages(5, reserve=2)
    swapped = pages.take_for_swap(4)
    assert len(swapped) == 4
    assert pages.take_for_swap(2) is None
    assert pages.available == 1


def test_swapped_pages_count_for_the_reserve():
    pages = HostPages(5, reserve=2)
    swapped = pages.take_for_swap(2)
    assert [pages.take_for_cache() is None for _ in range(4)] == [False, False, False, True]
    pages.free_swapped(swapped)
    assert pages.take_for_cache() is None


def test_page_freed_twice_is_named():
    pages = HostPages(2)
    page = pages.take_for_cache()
    pages.free_cached(page)
    with pytest.raises(AssertionError, match=f"host page {page} given back while free"):
        pages.free_cached(page)


def test_host_pool_beyond_machine_memory_names_both_sizes():
    with pytest.raises(ConfigError, match=r"ask for \d+.*this machine has"):
        HostPool(num_pages=1 << 40, page_bytes=1 << 20)


@pytest.mark.parametrize(
    ("free", "cached", "problems"),
    [
        ([3, 0], [1, 2], []),
        ([3, 0], [1], ["host pages [2] leaked: no set has them (1 in all)"]),
        ([3, 0], [1, 4], ["host pages [2] leaked: no set has them (1 in all)"]),
        ([3, 0], [1, -1], ["host pages [2] leaked: no set has them (1 in all)"]),
        ([3, 0], [1, 2, 0], ["host page 0 has 2 owners: free and cached"]),
        (
            [3, 0, 0],
            [1],
            ["host pages [2] leaked: no set has them (1 in all)", "host page 0 has 2 owners: free and free"],
        ),
    ],
)
def test_pages_without_one_owner_are_named(free, cached, problems):
    assert [*page_problems({"free": free, "cached": cached}, 4)] == problems


def test_pages_cost_memory_when_they_are_written_first():
    pool = HostPool(num_pages=1024, page_bytes=1 << 18)
    before = resident_bytes()
    pool.bytes_view()[:512] = 1
    assert resident_bytes() - before > 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_page_is_a_slice_of_the_pool():
    pool = HostPool(num_pages=3, page_bytes=4)
    pool.page_bytes_of(1)[:] = b"abcd"
    assert bytes(pool.bytes_view()[1].tolist()) == b"abcd"
    assert pool.bytes_view()[2].tolist() == [0, 0, 0, 0]
