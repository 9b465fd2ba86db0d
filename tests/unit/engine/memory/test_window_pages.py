from collections.abc import Sequence

import numpy as np
import pytest

from tandem_engine.base.names import PageId
from tandem_engine.memory.cache_groups import CacheLayout, KvRow, KvSpec, Reach
from tandem_engine.memory.group_pools import Demand, group_pages, page_ids_in
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.window_pages import WindowPages, usable_blocks
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_testing.memory_builders import assert_conserved, make_memory

PAGE = 4


def make_window(tokens: int, *, pages: int = 16, page_size: int = PAGE, page_ids: int = 65) -> WindowPages:
    return WindowPages(Reach(tokens), page_size=page_size, num_pages=pages + 1, page_ids=page_ids)


def with_windows(*windows: WindowPages, usable_pages: int = 64, page_size: int = PAGE) -> KvMemory:
    return make_memory(page_size=page_size, usable_pages=usable_pages, max_rows=64, max_pages=2048, windows=windows)


def begin(memory: KvMemory, tokens: Sequence[int]) -> RequestKv:
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
    assert kv is not None
    return kv


def compute(memory: KvMemory, tokens: Sequence[int], *, chunk: int = 1000) -> RequestKv:
    """A request whose `tokens` are computed in chunks, each of which enters the cache."""
    kv = begin(memory, tokens)
    while kv.committed_len < len(tokens):
        stop = min(kv.committed_len + chunk, len(tokens))
        assert memory.ensure(kv, stop)
        memory.commit(kv, stop)
        memory.checkpoint(kv, tokens)
        memory.pass_by(kv)
    return kv


def end(memory: KvMemory, kv: RequestKv, tokens: Sequence[int]) -> None:
    memory.release(kv, tokens, checkpoint=True, after_step=None)


def held(window: WindowPages) -> int:
    return window.num_pages - 1 - window.free_pages


@pytest.mark.parametrize(("page_size", "most"), [(1, 33), (16, 3), (64, 2)])
def test_long_output_holds_the_pages_of_its_window(page_size: int, most: int) -> None:
    """With a token launched that is not committed, as when steps overlap."""
    window = make_window(32, pages=most, page_size=page_size, page_ids=2100)
    memory = with_windows(window, usable_pages=2099, page_size=page_size)
    kv, seen = begin(memory, [1]), 0
    for token in range(2000):
        assert memory.ensure(kv, token + 2)
        seen = max(seen, held(window))
        memory.commit_next(kv)
        memory.pass_by(kv)
    assert_conserved(memory, [kv])
    assert seen == most
    assert len(kv.pages) == memory.pages_for(2001)


def test_passed_page_of_a_request_is_free_at_once() -> None:
    window = make_window(5)
    memory = with_windows(window)
    kv = begin(memory, range(20))
    assert memory.ensure(kv, 20)
    memory.commit(kv, 20)
    assert held(window) == 5
    memory.pass_by(kv)
    assert [int(window.page_of[page]) > 0 for page in kv.pages] == [False, False, False, False, True]
    assert held(window) == 1


def test_passed_page_of_the_tree_stays_while_there_is_room() -> None:
    window = make_window(5, pages=6)
    memory = with_windows(window)
    kv = compute(memory, range(20))
    assert (held(window), window.available) == (5, 5)
    other = begin(memory, [99])
    assert memory.ensure(other, 8)
    assert held(window) == 6
    assert [int(window.page_of[page]) > 0 for page in kv.pages] == [False, True, True, True, True]
    assert_conserved(memory, [kv, other])


def test_hit_ends_where_the_window_is_whole() -> None:
    window = make_window(9)
    memory = with_windows(window)
    tokens = [*range(40)]
    end(memory, compute(memory, tokens), tokens)
    path = memory.cache.match(tokens).pages
    assert memory.cached_len([*tokens, 7], space=BASE_SPACE, max_match=40) == 40
    window.drop([path[5]])
    # From 32 tokens on the next one reads 24 .. 32, so blocks 6 and 7.
    assert [usable_blocks([window], path[:blocks]) for blocks in range(11)] == [0, 1, 2, 3, 4, 5, 5, 5, 8, 9, 10]


def test_hit_ends_where_the_chunk_is_whole() -> None:
    window = WindowPages(Reach(chunk=12), page_size=PAGE, num_pages=17, page_ids=65)
    memory = with_windows(window)
    tokens = [*range(40)]
    end(memory, compute(memory, tokens), tokens)
    path = memory.cache.match(tokens).pages
    window.drop([path[4]])
    # The hole is in the chunk of blocks 3, 4 and 5: after 4 blocks it is not read yet, after 6 no longer.
    assert [usable_blocks([window], path[:blocks]) for blocks in range(11)] == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10]


def test_hit_is_one_for_all_windows() -> None:
    near, far = make_window(5), make_window(9)
    pages = [PageId(page) for page in range(1, 11)]
    for window in (near, far):
        window.attach(pages)
    near.drop([pages[9]])
    far.drop([pages[6]])
    # After 9 blocks both can continue: the hole of the far window is the seventh block, before those that it reads.
    assert usable_blocks([near], pages) == 9
    assert usable_blocks([near, far], pages) == 9
    far.drop([pages[7]])
    assert usable_blocks([near, far], pages) == 6


def test_request_that_offers_a_page_fills_the_hole() -> None:
    window = make_window(9)
    memory = with_windows(window)
    tokens = [*range(24)]
    end(memory, compute(memory, tokens), tokens)
    hole = memory.cache.match(tokens).pages[4]
    window.drop([hole])
    kv = begin(memory, tokens)
    assert kv.committed_len == 16
    assert memory.ensure(kv, 24)
    memory.commit(kv, 24)
    here = int(window.page_of[kv.pages[4]])
    memory.checkpoint(kv, tokens)
    assert kv.pages[4] == hole
    assert int(window.page_of[hole]) == here


def test_groups_are_given_pages_together_or_none() -> None:
    """Half of what a request needs would be kept from one that could run."""
    plenty, scarce = make_window(5), make_window(9, pages=3)
    memory = with_windows(plenty, scarce)
    kv = begin(memory, range(30))
    free = memory.allocator.available, plenty.free_pages, scarce.free_pages
    assert not memory.ensure(kv, 16)
    assert (memory.allocator.available, plenty.free_pages, scarce.free_pages) == free
    assert memory.ensure(kv, 12)


def test_passed_window_pages_are_evicted_before_conversations() -> None:
    window = make_window(9, pages=12)
    memory = with_windows(window)
    first, second = [*range(24)], [*range(100, 124)]
    for tokens in (first, second):
        end(memory, compute(memory, tokens), tokens)
    kv = begin(memory, [7])
    assert memory.ensure(kv, 4 * 8)
    # Eight pages had been passed; both conversations can be continued.
    assert [memory.cached_len(tokens, space=BASE_SPACE, max_match=24) for tokens in (first, second)] == [24, 24]
    assert memory.ensure(kv, 4 * 9)
    assert [memory.cached_len(tokens, space=BASE_SPACE, max_match=24) for tokens in (first, second)] == [0, 24]
    assert_conserved(memory, [kv])


def test_next_turn_keeps_its_window_while_it_is_pinned() -> None:
    window = make_window(9, pages=8)
    memory = with_windows(window)
    tokens = [*range(24)]
    end(memory, compute(memory, tokens), tokens)
    pin = memory.pin(tokens, space=BASE_SPACE)
    kv = begin(memory, [7])
    assert not memory.ensure(kv, 4 * 7)
    assert memory.ensure(kv, 4 * 6)
    assert memory.cached_len(tokens, space=BASE_SPACE, max_match=24) == 24
    memory.unpin(pin)
    assert memory.ensure(kv, 4 * 8)
    assert memory.cached_len(tokens, space=BASE_SPACE, max_match=24) == 0
    assert_conserved(memory, [kv])


def test_step_is_located_in_the_pages_of_the_window() -> None:
    window = make_window(5)
    window.attach([PageId(7), PageId(3)])
    here = [int(window.page_of[page]) for page in (7, 3)]
    pages = window.located(np.array([[7, 3, 0]], np.int32), np.array([7 * PAGE + 1, 3 * PAGE]))
    window.drop([PageId(7)])
    assert pages.page_table.tolist() == [[*here, 0]]
    assert pages.out_cache_loc.tolist() == [here[0] * PAGE + 1, here[1] * PAGE]


def test_load_is_that_of_the_fullest_group() -> None:
    window = make_window(9, pages=16)
    memory = with_windows(window, usable_pages=64)
    kv = begin(memory, [1])
    assert memory.ensure(kv, 4 * 12)
    assert memory.load() == (64 * 4 // 16, 0)


GEMMA3 = [KvSpec(Reach(None if layer % 6 == 5 else 512), KvRow(1, 256)) for layer in range(26)]
"""The 1B model."""


def test_three_times_the_requests_of_gemma3_fit() -> None:
    """Of 4,096 tokens, in the memory of 4,096 pages of all layers."""
    layout, demand = CacheLayout.of(GEMMA3), Demand(page_size=16, context_length=4096, chunk=512)
    page_ids = page_ids_in(layout, demand, 4096, itemsize=2)
    pages = group_pages(layout, demand, page_ids)
    sizes = [group.page_bytes(16, 2) for group in layout.groups]
    assert sum(map(int.__mul__, pages, sizes)) <= 4096 * sum(sizes)
    window = make_window(512, pages=pages[1] - 1, page_size=16, page_ids=page_ids)
    memory = with_windows(window, usable_pages=page_ids - 1, page_size=16)
    running: list[RequestKv] = []
    # A chunk and the window before it.
    while memory.available_pages() >= 256 and window.available >= 64:
        start = 10_000 * len(running)
        running.append(compute(memory, range(start, start + 4096), chunk=512))
    assert len(running) >= 3 * (4095 // 256)


def test_short_contexts_have_a_page_for_each_block() -> None:
    layout, demand = CacheLayout.of(GEMMA3), Demand(page_size=16, context_length=512, chunk=512)
    assert page_ids_in(layout, demand, 500, itemsize=2) == 500
    assert group_pages(layout, demand, 500) == [500, 500]
