from collections.abc import Callable, Sequence

import pytest

from tandem_engine.base.errors import OutOfPagesError
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.prefix_cache import MatchResult, NoPrefixCache, PrefixCache
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace
from tandem_testing.memory_builders import assert_conserved, make_memory, start_request

PROMPT = [*range(10)]
"""Two whole pages of four tokens and half a page."""


@pytest.fixture
def memory() -> KvMemory:
    return make_memory(page_size=4, usable_pages=16)


def finish(memory: KvMemory, kv: RequestKv, tokens: list[int], *, checkpoint: bool = True) -> None:
    memory.release(kv, tokens, checkpoint=checkpoint, after_step=None)


def row_of(memory: KvMemory, kv: RequestKv) -> list[int]:
    return [int(page) for page in memory.rows.table[kv.row, : len(kv.pages)]]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_started_page_is_a_page(memory: KvMemory, tokens: int, pages: int) -> None:
    assert memory.pages_for(tokens) == pages


def test_fresh_request_pins_nothing(memory: KvMemory) -> None:
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert (kv.cache_protected_len, kv.committed_len, kv.allocated_len) == (0, 0, 0)
    assert_conserved(memory, [kv])


def test_second_turn_computes_only_its_new_tokens(memory: KvMemory) -> None:
    first = start_request(memory, PROMPT)
    finish(memory, first, PROMPT)
    longer = [*PROMPT, 50, 51, 52]
    assert memory.cached_len(longer, space=BASE_SPACE, max_match=12) == 8
    second = memory.begin(longer, space=BASE_SPACE, max_match=12)
    assert second is not None
    assert (second.cache_protected_len, second.committed_len, second.allocated_len) == (8, 8, 8)
    assert row_of(memory, second) == second.pages
    assert_conserved(memory, [second])


def test_fully_cached_prompt_recomputes_its_last_page(memory: KvMemory) -> None:  # [one-token-computed]
    prompt = PROMPT[:8]
    finish(memory, start_request(memory, prompt), prompt)
    kv = memory.begin(prompt, space=BASE_SPACE, max_match=len(prompt) - 1)
    assert kv is not None
    assert kv.committed_len == 4


def test_planning_a_match_changes_nothing(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT), PROMPT)
    before = memory.available_pages()
    assert memory.cached_len(PROMPT, space=BASE_SPACE, max_match=9) == 8
    assert memory.cached_len(PROMPT, space=CacheSpace("other"), max_match=9) == 0
    assert memory.available_pages() == before
    assert_conserved(memory)


def test_admission_without_a_free_row_takes_no_pages(memory: KvMemory) -> None:  # [admission-unwinds]
    live = [start_request(memory, PROMPT) for _ in range(4)]
    assert memory.begin(PROMPT, space=BASE_SPACE, max_match=9) is None
    assert_conserved(memory, live)


class BrokenMatch(RadixCache):
    """Fails where a row has been taken already."""

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        raise RuntimeError("broken")


def test_match_that_fails_gives_the_row_back() -> None:  # [admission-unwinds]
    memory = make_memory(cache=BrokenMatch(4))
    with pytest.raises(RuntimeError, match="broken"):
        memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert memory.rows.available == 4


def test_row_that_cannot_be_filled_gives_row_and_lock_back() -> None:  # [admission-unwinds]
    memory = make_memory(max_pages=1)
    pages = memory.allocator.alloc(2)
    memory.cache.unlock(memory.cache.insert(PROMPT[:8], pages).lock)
    with pytest.raises(AssertionError, match="would need 2 pages"):
        memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert_conserved(memory)


def test_ensure_takes_whole_pages_and_only_the_missing_ones(memory: KvMemory) -> None:
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 5)
    assert kv.allocated_len == 8
    held = tuple(kv.pages)
    assert memory.ensure(kv, 8)
    assert tuple(kv.pages) == held
    assert memory.ensure(kv, 9)
    assert tuple(kv.pages)[:2] == held
    assert row_of(memory, kv) == kv.pages
    assert_conserved(memory, [kv])


def test_ensure_evicts_only_needed_pages(memory: KvMemory) -> None:
    old = [*range(100, 140)]
    finish(memory, start_request(memory, old), old)
    assert (memory.allocator.available, memory.cache.evictable_pages()) == (6, 10)
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 8 * 4)
    assert memory.cached_len(old, space=BASE_SPACE, max_match=40) == 8 * 4
    assert_conserved(memory, [kv])


def test_ensure_that_cannot_succeed_changes_nothing(memory: KvMemory) -> None:
    old = [*range(100, 140)]
    finish(memory, start_request(memory, old), old)
    locked = memory.begin(old, space=BASE_SPACE, max_match=20)
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert locked is not None
    assert kv is not None
    available = memory.available_pages()
    assert available == 11
    assert not memory.ensure(kv, 12 * 4)
    assert kv.pages == []
    assert memory.cached_len(old, space=BASE_SPACE, max_match=40) == 40
    assert memory.available_pages() == available
    assert memory.ensure(kv, 11 * 4)
    assert_conserved(memory, [locked, kv])


def test_fenced_pages_are_not_available(memory: KvMemory) -> None:  # [page-fence]
    kv = start_request(memory, PROMPT)
    memory.release(kv, PROMPT, checkpoint=False, after_step=4)
    assert (memory.available_pages(), memory.rows.available) == (13, 3)
    assert memory.reserve_pages(14) is None
    memory.settled(4)
    assert (memory.available_pages(), memory.rows.available) == (16, 4)
    assert_conserved(memory)


def test_reserved_pages_are_held_until_released(memory: KvMemory) -> None:
    pages = memory.reserve_pages(3)
    assert pages is not None
    assert_conserved(memory, held=pages)
    memory.give_back(pages)
    assert_conserved(memory)


@pytest.mark.parametrize("length", [7, 13])
def test_commit_only_moves_forward_within_allocated_pages(memory: KvMemory, length: int) -> None:
    kv = start_request(memory, PROMPT[:8])
    assert memory.ensure(kv, 12)
    with pytest.raises(AssertionError, match=f"cannot commit {length} tokens"):
        memory.commit(kv, length)


def test_caching_shares_full_committed_pages_only(memory: KvMemory) -> None:
    kv = start_request(memory, PROMPT)
    memory.checkpoint(kv, PROMPT)
    assert kv.cache_protected_len == 8
    assert kv.private_pages == kv.pages[2:]
    assert memory.cached_len(PROMPT, space=BASE_SPACE, max_match=9) == 8
    assert_conserved(memory, [kv])


def test_unsettled_tokens_are_never_matched(memory: KvMemory) -> None:  # [settled-before-shared]
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 10)
    memory.commit(kv, 5)
    memory.checkpoint(kv, PROMPT)
    assert memory.cached_len(PROMPT, space=BASE_SPACE, max_match=9) == 4


def test_checkpoints_grow_the_same_path(memory: KvMemory) -> None:
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 10)
    for settled, protected in [(3, 0), (4, 4), (7, 4), (10, 8)]:
        memory.commit(kv, settled)
        memory.checkpoint(kv, PROMPT)
        assert kv.cache_protected_len == protected
        assert_conserved(memory, [kv])


def test_checkpointed_prefix_cannot_be_evicted_under_its_request(memory: KvMemory) -> None:  # [lock-covers-node]
    kv = start_request(memory, PROMPT)
    memory.checkpoint(kv, PROMPT)
    assert memory.clear_cache() == 0
    assert_conserved(memory, [kv])


def test_later_of_two_equal_prompts_adopts_cached_pages(memory: KvMemory) -> None:
    first, second = start_request(memory, PROMPT), start_request(memory, PROMPT)
    own = list(second.pages)
    memory.checkpoint(first, PROMPT)
    memory.checkpoint(second, PROMPT)
    assert second.pages == [*first.pages[:2], own[2]]
    assert row_of(memory, second) == second.pages
    assert {*own[:2]} <= {*memory.allocator.free_page_ids()}
    assert_conserved(memory, [first, second])


def test_deduplicated_page_is_fenced_until_its_step_completes(memory: KvMemory) -> None:  # [page-fence]
    first, second = start_request(memory, PROMPT), start_request(memory, PROMPT)
    memory.checkpoint(first, PROMPT)
    memory.checkpoint(second, PROMPT, after_step=7)
    assert memory.allocator.fenced_pages == 2
    assert_conserved(memory, [first, second])
    memory.settled(7)
    assert memory.allocator.fenced_pages == 0


def test_release_caches_full_pages_and_frees_partial_page(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT), PROMPT)
    report = assert_conserved(memory)
    assert (report.tree, report.free) == (2, 14)


def test_release_without_a_checkpoint_keeps_nothing(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT), PROMPT, checkpoint=False)
    assert assert_conserved(memory).free == 16


@pytest.mark.parametrize("checkpoint", [True, False])
def test_overshoot_write_finds_its_page_unused(memory: KvMemory, checkpoint: bool) -> None:  # [page-fence]
    kv = start_request(memory, PROMPT)
    overshoot = kv.pages[2]
    memory.release(kv, PROMPT, checkpoint=checkpoint, after_step=9)
    other = memory.begin([], space=BASE_SPACE, max_match=0)
    assert other is not None
    assert other.row != kv.row
    assert memory.ensure(other, memory.available_pages() * 4)
    assert overshoot not in other.pages
    memory.settled(9)
    assert overshoot in {*memory.allocator.free_page_ids()}


LeaveTwice = Callable[[KvMemory, RequestKv], object]


@pytest.mark.parametrize(
    "leave",
    [
        lambda memory, kv: memory.release(kv, PROMPT, checkpoint=True, after_step=None),
        lambda memory, kv: memory.release(kv, PROMPT, checkpoint=False, after_step=1),
        lambda memory, kv: memory.detach(kv),
        lambda memory, kv: memory.ensure(kv, 4),
        lambda memory, kv: memory.commit(kv, 0),
        lambda memory, kv: memory.checkpoint(kv, PROMPT),
    ],
    ids=["release", "release_fenced", "detach", "ensure", "commit", "checkpoint"],
)
def test_released_kv_cannot_be_used_again(memory: KvMemory, leave: LeaveTwice) -> None:  # [single-release]
    kv = start_request(memory, PROMPT)
    finish(memory, kv, PROMPT)
    with pytest.raises(AssertionError, match="released already"):
        leave(memory, kv)
    assert_conserved(memory)


def test_detached_pages_belong_to_the_hold_until_given_back(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT), PROMPT)
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 16)
    private = list(kv.private_pages)
    held = memory.detach(kv)
    assert held == private
    assert memory.rows.available == 4
    assert assert_conserved(memory, held=held).held == 2
    memory.give_back(held)
    assert_conserved(memory)


def test_clearing_the_cache_frees_unlocked_pages(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT), PROMPT)
    assert memory.clear_cache() == 2
    assert memory.allocator.available == 16


def test_tenants_do_not_see_each_others_prefixes(memory: KvMemory) -> None:
    finish(memory, start_request(memory, PROMPT, space=CacheSpace("a")), PROMPT)
    assert memory.cached_len(PROMPT, space=CacheSpace("b"), max_match=9) == 0
    assert memory.cached_len(PROMPT, space=CacheSpace("a"), max_match=9) == 8


@pytest.mark.parametrize("make_cache", [lambda: RadixCache(4), NoPrefixCache], ids=["radix", "none"])
def test_same_life_works_with_and_without_a_cache(make_cache: Callable[[], PrefixCache]) -> None:
    memory = make_memory(page_size=4, usable_pages=8, cache=make_cache())
    for _ in range(5):
        kv = start_request(memory, PROMPT)
        memory.checkpoint(kv, PROMPT, after_step=1)
        assert_conserved(memory, [kv])
        memory.release(kv, PROMPT, checkpoint=True, after_step=1)
        memory.settled(1)
        assert_conserved(memory)
    assert memory.available_pages() == 8


def test_row_holds_the_longest_request_and_no_more() -> None:
    memory = make_memory(max_pages=2)
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=9)
    assert kv is not None
    assert memory.ensure(kv, 8)
    with pytest.raises(AssertionError, match="would need 3 pages"):
        memory.ensure(kv, 9)


def test_allocation_never_exceeds_free_pages(memory: KvMemory) -> None:
    kv = memory.begin([], space=BASE_SPACE, max_match=0)
    assert kv is not None
    assert memory.ensure(kv, 16 * 4)
    assert memory.reserve_pages(1) is None
    with pytest.raises(OutOfPagesError):
        memory.allocator.alloc(1)
