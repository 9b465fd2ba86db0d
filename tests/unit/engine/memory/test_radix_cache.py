import random
import sys

import pytest

from tandem_engine.base.names import PageId
from tandem_engine.memory.prefix_cache import InsertResult, Lock
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.messages.kv_events import (
    BASE_SPACE,
    AllCleared,
    BlockRemoved,
    BlockStored,
    CacheSpace,
    chain_hashes,
    chain_seed,
)
from tandem_testing.memory_events import replayed
from tandem_testing.opcodes import opcodes_of


def pages(first: int, count: int) -> list[PageId]:
    return [PageId(first + i) for i in range(count)]


def run(page_size: int, *blocks: int) -> list[int]:
    """Tokens of the given block contents: equal numbers are equal blocks."""
    return [1000 * block + i for block in blocks for i in range(page_size)]


def store(
    cache: RadixCache, tokens: list[int], offered: list[PageId], *, space: CacheSpace = BASE_SPACE
) -> InsertResult:
    """Insert and give the lock back."""
    result = cache.insert(tokens, offered, space=space)
    cache.unlock(result.lock)
    return result


def cached(cache: RadixCache, tokens: list[int], *, space: CacheSpace = BASE_SPACE) -> tuple[PageId, ...]:
    """Match and give the lock back."""
    match = cache.match(tokens, space=space)
    cache.unlock(match.lock)
    return match.pages


@pytest.fixture(params=[1, 4, 16], ids=lambda size: f"page{size}")
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def cache(size: int) -> RadixCache:
    return RadixCache(size)


def test_empty_cache_matches_nothing(cache: RadixCache, size: int) -> None:
    match = cache.match(run(size, 1, 2))
    assert match.pages == ()
    assert cache.audit([match.lock]) == []


def test_inserted_prefix_is_matched(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    assert cached(cache, run(size, 1, 2, 3)) == (1, 2, 3)
    assert cached(cache, run(size, 1, 2, 3, 4)) == (1, 2, 3)


def test_partial_match_ends_at_a_page_boundary_inside_a_node(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    assert cached(cache, run(size, 1, 2, 9)) == (1, 2)
    assert cached(cache, run(size, 1)) == (1,)
    assert cached(cache, run(size, 9, 2, 3)) == ()
    assert cached(cache, run(size, 1, 2, 3)) == (1, 2, 3)


def test_partial_page_is_not_matched() -> None:  # [whole-pages]
    cache = RadixCache(4)
    store(cache, run(4, 1, 2), pages(1, 2))
    assert cached(cache, run(4, 1, 2)[:7]) == (1,)
    assert cached(cache, run(4, 1, 2)[:3]) == ()


def test_match_is_capped_in_tokens_and_rounded_down_to_pages() -> None:  # [one-token-computed]
    cache = RadixCache(4)
    tokens = run(4, 1, 2, 3)
    store(cache, tokens, pages(1, 3))
    for cap, expected in [(12, 3), (11, 2), (8, 2), (7, 1), (3, 0), (0, 0)]:
        match = cache.match(tokens, max_tokens=cap)
        cache.unlock(match.lock)
        assert len(match.pages) == expected
        assert cache.peek(tokens, max_tokens=cap) == expected


def test_negative_cap_is_a_bug_and_not_a_slice(cache: RadixCache, size: int) -> None:
    with pytest.raises(AssertionError, match="at most -1 tokens"):
        cache.match(run(size, 1), max_tokens=-1)


def test_branches_share_their_common_pages(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    second = store(cache, run(size, 1, 2, 4), [*pages(1, 2), PageId(7)])
    assert second.pages == (1, 2, 7)
    assert second.duplicates == ()
    assert sorted(cache.pages()) == [1, 2, 3, 7]
    assert cached(cache, run(size, 1, 2, 3)) == (1, 2, 3)
    assert cached(cache, run(size, 1, 2, 4)) == (1, 2, 7)


def test_pages_of_cached_tokens_return_as_duplicates(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    result = store(cache, run(size, 1, 2, 3), pages(5, 3))
    assert result.duplicates == (5, 6)
    assert result.pages == (1, 2, 7)
    assert sorted(cache.pages()) == [1, 2, 7]


def test_pinned_prefix_is_no_duplicate(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    result = store(cache, run(size, 1, 2, 3), [PageId(1), PageId(6), PageId(7)])
    assert result.duplicates == (6,)


def test_inserting_cached_prefix_adds_nothing(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    result = cache.insert(run(size, 1, 2), pages(1, 2))
    assert (result.pages, result.duplicates) == ((1, 2), ())
    assert cache.evictable_pages() == 1
    assert cache.evict(9) == [3]
    cache.unlock(result.lock)


def test_inserting_nothing_locks_nothing(cache: RadixCache) -> None:  # [whole-pages]
    result = cache.insert([], [])
    assert (result.pages, result.duplicates) == ((), ())
    cache.unlock(result.lock)
    assert cache.audit([]) == []


def test_pages_must_cover_the_tokens_exactly(cache: RadixCache, size: int) -> None:
    with pytest.raises(AssertionError, match="cannot hold exactly"):
        cache.insert(run(size, 1, 2), pages(1, 1))


def test_salts_share_nothing(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2), space=CacheSpace("a"))
    assert cached(cache, run(size, 1, 2), space=CacheSpace("b")) == ()
    assert cached(cache, run(size, 1, 2)) == ()
    result = store(cache, run(size, 1, 2), pages(5, 2), space=CacheSpace("b"))
    assert result.duplicates == ()
    assert cached(cache, run(size, 1, 2), space=CacheSpace("b")) == (5, 6)


def test_salt_without_content_adds_no_node(cache: RadixCache, size: int) -> None:
    for tenant in range(5):
        cached(cache, run(size, 1), space=CacheSpace(str(tenant)))
        store(cache, run(size, 1), [PageId(tenant + 1)], space=CacheSpace(str(tenant)))
    cache.clear()
    assert cache._roots == {}


def test_locked_path_survives_any_eviction(cache: RadixCache, size: int) -> None:  # [lock-covers-node]
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    match = cache.match(run(size, 1, 2))
    assert cache.evict(sys.maxsize) == [3]
    assert cached(cache, run(size, 1, 2, 3)) == (1, 2)
    cache.unlock(match.lock)
    assert sorted(cache.evict(sys.maxsize)) == [1, 2]


def test_insert_is_locked_from_the_start(cache: RadixCache, size: int) -> None:  # [lock-covers-node]
    result = cache.insert(run(size, 1, 2), pages(1, 2))
    assert cache.evict(sys.maxsize) == []
    cache.unlock(result.lock)
    assert cache.evictable_pages() == 2


def test_lock_given_back_twice_is_a_bug(cache: RadixCache, size: int) -> None:  # [lock-released-once]
    match = cache.match(run(size, 1))
    cache.unlock(match.lock)
    assert match.lock.released
    with pytest.raises(AssertionError, match="released twice"):
        cache.unlock(match.lock)
    assert cache.audit([]) == []


def test_two_locks_on_one_path_are_two_locks(cache: RadixCache, size: int) -> None:  # [lock-released-once]
    store(cache, run(size, 1, 2), pages(1, 2))
    first, second = cache.match(run(size, 1, 2)), cache.match(run(size, 1, 2))
    cache.unlock(first.lock)
    assert cache.evict(9) == []
    cache.unlock(second.lock)
    assert cache.evictable_pages() == 2


def test_lock_taken_before_a_split_still_covers_its_whole_path(cache: RadixCache, size: int) -> None:
    result = cache.insert(run(size, 1, 2, 3), pages(1, 3))
    store(cache, run(size, 1, 9), [PageId(1), PageId(8)])
    assert cache.audit([result.lock]) == []
    assert cache.evict(9) == [8]
    cache.unlock(result.lock)
    assert cache.evictable_pages() == 3
    assert cache.audit([]) == []


def test_least_recently_used_leaf_goes_first(cache: RadixCache, size: int) -> None:
    for block in (1, 2, 3):
        store(cache, run(size, block), [PageId(block)])
    cached(cache, run(size, 1))
    assert cache.evict(1) == [2]
    assert cache.evict(2) == [3, 1]


def test_peeking_does_not_count_as_use(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1), [PageId(1)])
    store(cache, run(size, 2), [PageId(2)])
    assert cache.peek(run(size, 1)) == 1
    assert cache.evict(1) == [1]


def test_parent_is_evicted_after_its_last_child(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    store(cache, run(size, 5), [PageId(5)])
    store(cache, run(size, 1, 3), [PageId(1), PageId(3)])
    assert cache.evict(9) == [2, 5, 3, 1]


@pytest.mark.parametrize("wanted", range(8))
def test_eviction_returns_requested_pages_or_all(wanted: int) -> None:  # [evict-exact]
    cache = RadixCache(4)
    store(cache, run(4, 1, 2, 3), pages(1, 3))
    store(cache, run(4, 1, 9, 8), [PageId(1), *pages(5, 2)])
    assert len(cache.evict(wanted)) == min(wanted, 5)
    assert cache.evictable_pages() == 5 - min(wanted, 5)
    assert cache.audit([]) == []


def test_leaf_is_evicted_from_its_end(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    assert cache.evict(1) == [3]
    assert cached(cache, run(size, 1, 2, 3)) == (1, 2)


def test_clear_keeps_only_locked_nodes(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    store(cache, run(size, 7), [PageId(7)])
    match = cache.match(run(size, 1))
    assert sorted(cache.clear()) == [2, 7]
    assert [*cache.pages()] == [1]
    cache.unlock(match.lock)


def test_eviction_work_does_not_grow_with_tree_size() -> None:  # [evict-without-scan]
    def work(leaves: int) -> int:
        cache = RadixCache(4)
        for block in range(leaves):
            store(cache, run(4, block % 7, 100 + block), [PageId(2 * block + 1), PageId(2 * block + 2)])
        cache.take_events()
        return opcodes_of(lambda: cache.evict(1))

    assert 0 < work(600) <= work(20)


def test_chunks_of_one_request_make_one_node(cache: RadixCache, size: int) -> None:
    lock = cache.match([]).lock
    for block in (1, 2, 3, 4):
        lock = cache.extend(lock, run(size, block), [PageId(block)]).lock
    assert len([*cache._nodes()]) == 1
    assert cached(cache, run(size, 1, 2, 3, 4)) == (1, 2, 3, 4)
    assert cache.audit([lock]) == []
    cache.unlock(lock)
    assert cache.evictable_pages() == 4


def test_node_that_others_have_locked_does_not_grow(cache: RadixCache, size: int) -> None:
    first = cache.insert(run(size, 1), [PageId(1)]).lock
    other = cache.match(run(size, 1)).lock
    longer = cache.extend(first, run(size, 2), [PageId(2)]).lock
    cache.unlock(longer)
    assert cache.evict(9) == [2]
    assert cached(cache, run(size, 1)) == (1,)
    assert cache.audit([other]) == []


def test_extend_switches_to_pages_stored_by_another_request(cache: RadixCache, size: int) -> None:
    mine = cache.insert(run(size, 1), [PageId(1)]).lock
    store(cache, run(size, 1, 2, 3), [PageId(1), *pages(2, 2)])
    result = cache.extend(mine, run(size, 2, 4), pages(8, 2))
    assert (result.pages, result.duplicates) == ((2, 9), (8,))
    assert cached(cache, run(size, 1, 2, 4)) == (1, 2, 9)
    assert cache.audit([result.lock]) == []


def test_extend_releases_the_given_lock(cache: RadixCache, size: int) -> None:  # [lock-released-once]
    lock = cache.match([]).lock
    longer = cache.extend(lock, run(size, 1), [PageId(1)]).lock
    assert lock.released
    with pytest.raises(AssertionError, match="released twice"):
        cache.extend(lock, run(size, 2), [PageId(2)])
    assert cache.audit([longer]) == []


def test_extending_a_long_path_does_the_same_work_as_a_short_one() -> None:
    def work(blocks: int) -> int:
        cache = RadixCache(4)
        lock = cache.insert(run(4, *range(blocks)), pages(1, blocks)).lock
        cache.take_events()
        return opcodes_of(lambda: cache.extend(lock, run(4, 1), [PageId(5000)]))

    assert 0 < work(500) <= work(5)


def test_stored_events_are_kept_across_split_and_eviction(cache: RadixCache, size: int) -> None:
    chain = chain_hashes(run(size, 1, 2, 3, 4), size, parent=chain_seed(""))
    lock = cache.insert(run(size, 1, 2), pages(1, 2)).lock
    lock = cache.extend(lock, run(size, 3, 4), pages(3, 2)).lock
    cached(cache, run(size, 1))
    cache.unlock(lock)
    cache.evict(1)
    assert cache.take_events() == [
        BlockStored(hashes=tuple(chain[:2])),
        BlockStored(hashes=tuple(chain[2:])),
        BlockRemoved(hashes=(chain[3],)),
    ]


def test_stored_events_use_chained_hashes_parents_first(cache: RadixCache, size: int) -> None:
    tokens = run(size, 1, 2, 3)
    chain = chain_hashes(tokens, size, parent=chain_seed("tenant"))
    store(cache, tokens[: 2 * size], pages(1, 2), space=CacheSpace("tenant"))
    store(cache, tokens, pages(1, 3), space=CacheSpace("tenant"))
    assert cache.take_events() == [
        BlockStored(hashes=tuple(chain[:2])),
        BlockStored(hashes=tuple(chain[2:])),
    ]
    assert cache.take_events() == []


def test_evicted_blocks_are_withdrawn(cache: RadixCache, size: int) -> None:
    tokens = run(size, 1, 2, 3)
    chain = chain_hashes(tokens, size, parent=chain_seed(""))
    store(cache, tokens, pages(1, 3))
    cache.take_events()
    cache.evict(2)
    assert cache.take_events() == [BlockRemoved(hashes=tuple(chain[1:]))]


def test_match_that_splits_a_node_announces_nothing(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    cache.take_events()
    cached(cache, run(size, 1))
    assert cache.take_events() == []


def test_snapshot_starts_over_and_names_parents_before_children(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    store(cache, run(size, 1, 3), [PageId(1), PageId(3)])
    first, *rest = cache.snapshot_events()
    assert first == AllCleared()
    named = [digest for event in rest if isinstance(event, BlockStored) for digest in event.hashes]
    root, left, right = (
        chain_hashes(run(size, *blocks), size, parent=chain_seed(""))[-1] for blocks in ((1,), (1, 2), (1, 3))
    )
    assert named[0] == root
    assert {*named[1:]} == {left, right}


def test_silent_cache_emits_nothing_and_can_still_be_replayed(size: int) -> None:
    cache = RadixCache(size, emit_events=False)
    for length in (1, 2, 3):
        store(cache, run(size, *range(length)), pages(1, length))
    cache.evict(1)
    assert cache.take_events() == []
    expected = chain_hashes(run(size, 0, 1), size, parent=chain_seed(""))
    assert replayed(cache.snapshot_events()) == {*expected}


def test_spent_path_is_evicted_before_older_ones(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    store(cache, run(size, 5, 6), pages(5, 2))
    cache.unlock(cache.match(run(size, 5, 6)).lock, spent=True)
    assert {*cache.evict(2)} == {5, 6}
    assert cache.evict(1) == [2]
    assert cache.audit([]) == []


def test_shared_part_of_a_spent_path_stays(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2, 3), pages(1, 3))
    store(cache, run(size, 1, 2, 4), [PageId(1), PageId(2), PageId(4)])
    store(cache, run(size, 7), pages(7, 1))
    cache.unlock(cache.match(run(size, 1, 2, 4)).lock, spent=True)
    assert cache.evict(1) == [4]
    assert cache.evict(1) == [3]
    assert cache.audit([]) == []


def test_spent_path_with_another_lock_keeps_its_recency(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1, 2), pages(1, 2))
    store(cache, run(size, 7), pages(7, 1))
    held = cache.match(run(size, 1, 2)).lock
    cache.unlock(cache.match(run(size, 1, 2)).lock, spent=True)
    cache.unlock(held)
    assert cache.evict(1) == [7]
    assert cache.evict(1) == [2]


@pytest.mark.parametrize("seed", range(5))
def test_replaying_the_events_gives_the_snapshot(size: int, seed: int) -> None:
    rng = random.Random(seed)
    cache, known, locks = RadixCache(size), set[bytes](), list[Lock]()
    next_page = 1
    for _ in range(120):
        tokens = run(size, *(rng.randrange(3) for _ in range(rng.randrange(5))))
        match rng.randrange(5):
            case 0:
                locks.append(cache.match(tokens).lock)
            case 4 if locks:
                lock = locks.pop(rng.randrange(len(locks)))
                count = len(tokens) // size
                locks.append(cache.extend(lock, tokens, pages(next_page, count)).lock)
                next_page += count
            case 1 | 2:
                count = len(tokens) // size
                locks.append(cache.insert(tokens, pages(next_page, count)).lock)
                next_page += count
            case _:
                cache.evict(rng.randrange(4))
        if len(locks) > 3:
            cache.unlock(locks.pop(rng.randrange(len(locks))))
        assert cache.audit(locks) == []
        if rng.random() < 0.5:  # what was stored before is split, grown and evicted before the first query
            known = replayed(cache.take_events(), known)
            assert known == replayed(cache.snapshot_events())


def test_audit_reports_leaked_tree_locks(cache: RadixCache, size: int) -> None:
    root_and_leaf = cache.insert(run(size, 1), pages(1, 1)).lock
    assert cache.audit([root_and_leaf]) == []
    assert cache.audit([]) == [
        "tree node with pages [] counts 1 locks, requests hold 0",
        "tree node with pages [1] counts 1 locks, requests hold 0",
    ]


def test_audit_sees_a_lock_on_an_empty_match(cache: RadixCache, size: int) -> None:  # [lock-released-once]
    cache.match(run(size, 1))
    assert cache.audit([]) == ["tree node with pages [] counts 1 locks, requests hold 0"]


def test_audit_sees_a_wrong_evictable_count(cache: RadixCache, size: int) -> None:
    store(cache, run(size, 1), pages(1, 1))
    cache._evictable += 1
    assert cache.audit([]) == ["1 tree pages are evictable, the counter is 2"]
