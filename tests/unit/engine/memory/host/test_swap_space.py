import pytest

from tandem_engine.memory.allocator import Writer
from tandem_engine.memory.page_copies import CopyKind
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_testing.memory_builders import assert_conserved, start_request
from tandem_testing.tier_builders import Tiers, make_tiers

PROMPT = [*range(1, 11)]
"""Two whole pages and half a page."""


@pytest.fixture
def tiers() -> Tiers:
    return make_tiers(host_pages=6, swap_pages=4)


def swap_out(tiers: Tiers, tokens: list[int]):
    kv = start_request(tiers.memory, tokens)
    swapped = tiers.host.swap.out(kv, shared=tiers.memory.cache.shared_pages(kv.lock))
    tiers.memory.release(kv, tokens, checkpoint=False, after_step=None)
    return swapped


def begin_again(tiers: Tiers, swapped, tokens: list[int]):
    kv = tiers.memory.begin(tokens, space=BASE_SPACE, max_match=swapped.committed_len)
    assert tiers.memory.ensure(kv, len(tokens) + 1)
    return kv


def test_committed_kv_is_swapped_in_with_partial_page(tiers):
    swapped = swap_out(tiers, PROMPT)
    assert (swapped.first_page, len(swapped.pages), swapped.committed_len) == (0, 3, 10)
    assert_conserved(tiers.memory, swapped=[swapped])
    kv = begin_again(tiers, swapped, PROMPT)
    tiers.host.swap.back(swapped, kv)
    assert kv.committed_len == kv.computed_from == 10
    out, back = tiers.device.seen
    assert (out.kind, back.kind) == (CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE)
    assert [*back.source] == [*out.target] == [*swapped.pages]
    assert [*back.target] == kv.pages[:3]
    assert not tiers.memory.readable(kv)
    tiers.check(kv)


def test_swap_in_skips_pages_still_cached(tiers):
    kv = start_request(tiers.memory, PROMPT)
    swapped = tiers.host.swap.out(kv, shared=0)
    tiers.memory.release(kv, PROMPT, checkpoint=True, after_step=None)
    kv = begin_again(tiers, swapped, PROMPT)
    tiers.host.swap.back(swapped, kv)
    assert [*tiers.device.seen[-1].source] == [swapped.pages[2]]


def test_swap_out_skips_pages_locked_by_others(tiers):
    tiers.serve(PROMPT)
    sharer = tiers.memory.begin([*PROMPT[:8], 99], space=BASE_SPACE, max_match=8)
    swapped = swap_out(tiers, PROMPT)
    assert (swapped.first_page, len(swapped.pages)) == (2, 1)
    kv = tiers.memory.begin(PROMPT, space=BASE_SPACE, max_match=10)
    assert tiers.host.swap.completes(swapped, kv)
    tiers.memory.release(kv, (), checkpoint=False, after_step=None)
    tiers.memory.release(sharer, (), checkpoint=False, after_step=None)
    tiers.memory.clear_cache()
    kv = tiers.memory.begin(PROMPT, space=BASE_SPACE, max_match=10)
    assert not tiers.host.swap.completes(swapped, kv)
    tiers.host.swap.drop(swapped)
    tiers.check(kv)


def test_host_pages_rest_until_the_copies_are_acked(tiers):  # [copy-acked]
    swapped = swap_out(tiers, PROMPT)
    tiers.host.swap.drop(swapped)
    tiers.memory.poll()
    assert tiers.host.tier.pages.available == 3
    tiers.check()
    tiers.turn()
    tiers.memory.poll()
    assert tiers.host.tier.pages.available == 6


def test_full_host_memory_swaps_no_request():
    tiers = make_tiers(host_pages=2, swap_pages=2)
    assert swap_out(tiers, PROMPT) is None
    assert tiers.device.seen == []
    assert tiers.host.tier.pages.available == 2


def test_cached_host_blocks_are_evicted_for_swapped_request(tiers):
    tiers.serve([*range(20, 29)])
    tiers.evict_device()
    tiers.turn()
    assert len(tiers.host.tier.blocks) == 2
    first, second = (swap_out(tiers, [*range(start, start + 9)]) for start in (40, 60))
    assert first is not None
    assert second is not None
    assert len(tiers.host.tier.blocks) == 0
    assert_conserved(tiers.memory, swapped=[first, second])


def stateful_tiers(host_pages: int = 8) -> Tiers:
    """Of a model whose states take two host pages."""
    tiers = make_tiers(host_pages=host_pages, swap_pages=6)
    tiers.host.swap.state_pages = 2
    return tiers


def test_state_is_swapped_with_pages_of_its_request():
    tiers = stateful_tiers()
    kv = start_request(tiers.memory, PROMPT)
    row, swap = kv.row, tiers.host.swap
    assert swap.pages_to_move(kv, shared=0) == 5
    swapped = swap.out(kv, shared=0)
    tiers.memory.release(kv, PROMPT, checkpoint=False, after_step=None)
    assert swapped is not None
    assert (len(swapped.pages), len(swapped.state)) == (3, 2)
    assert len({*swapped.all_pages}) == 5
    assert_conserved(tiers.memory, swapped=[swapped])
    start_request(tiers.memory, [*range(50, 53)])  # takes the row
    kv = begin_again(tiers, swapped, PROMPT)
    swap.back(swapped, kv)
    out, back = (copy for copy in tiers.device.seen if copy.kind.is_of_state)
    assert kv.row != row
    assert ([*out.source], [*back.target]) == ([2 * row, 2 * row + 1], [2 * kv.row, 2 * kv.row + 1])
    assert [*out.target] == [*back.source] == [*swapped.state]
    assert not tiers.memory.readable(kv)


def test_request_without_host_space_for_state_is_not_swapped():
    tiers = stateful_tiers(host_pages=4)
    assert swap_out(tiers, PROMPT) is None
    assert tiers.host.tier.pages.available == 4


def test_no_peer_gets_a_row_before_copies_of_states_are_acked():  # [page-fence]
    tiers = stateful_tiers()
    swap_out(tiers, PROMPT)
    kv = tiers.memory.begin([*range(60, 63)], space=BASE_SPACE, max_match=2)
    assert kv is not None
    assert not tiers.memory.ensure(kv, 3, Writer.PEER)
    assert kv.pages == []
    tiers.turn()
    assert tiers.memory.ensure(kv, 3, Writer.PEER)
