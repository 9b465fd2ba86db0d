"""The modelled cache: least recently used first, prefixes last, held blocks never; and the limits it gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_lab.simulate.block_cache import BlockCache, infinite_cache, pooled_lru
from tandem_services.router.index import IndexUpdate, UpdateKind


def chain(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def serve(cache: BlockCache, text: str) -> int:
    blocks = chain(text)
    matched = cache.match(blocks)
    cache.hold(blocks[:matched])
    cache.take(len(blocks) - matched)
    cache.store(blocks, matched)
    cache.release(blocks)
    return matched


def test_end_of_the_oldest_prompt_leaves_first():
    cache = BlockCache(4)
    serve(cache, "abc")
    serve(cache, "xy")
    assert cache.match(chain("abc")) == 2
    assert cache.match(chain("xy")) == 2


def test_held_blocks_stay_and_take_room():
    cache = BlockCache(3)
    serve(cache, "ab")
    cache.hold(chain("a"))
    assert cache.room == 2
    cache.take(2)
    assert cache.match(chain("ab")) == 1
    with pytest.raises(AssertionError, match="do not fit"):
        cache.take(1)


def hold_and_release(cache: BlockCache, text: str) -> None:
    cache.hold(chain(text))
    cache.release(chain(text), spent=True)


def test_served_blocks_are_evicted_before_older_ones():
    cache = BlockCache(5)
    serve(cache, "abc")
    serve(cache, "xy")
    hold_and_release(cache, "xy")
    cache.take(2)
    assert cache.match(chain("abc")) == 3
    assert cache.match(chain("xy")) == 0


def test_served_blocks_with_other_successors_stay():
    cache = BlockCache(5)
    serve(cache, "abc")
    serve(cache, "abxy")
    hold_and_release(cache, "abxy")
    cache.take(3)
    assert cache.match(chain("abxy")) == 2
    serve(cache, "ab")
    hold_and_release(cache, "ab")  # nothing else continues it any more
    assert cache.changes()[-1] == IndexUpdate(UpdateKind.REMOVED, (b"y", b"x", b"c"))
    cache.take(1)
    assert cache.match(chain("ab")) == 1


def test_held_served_blocks_stay():
    cache = BlockCache(4)
    serve(cache, "xy")
    cache.hold(chain("x"))
    hold_and_release(cache, "xy")
    cache.take(3)
    assert cache.match(chain("xy")) == 1
    cache.release(chain("x"))
    assert cache.match(chain("xy")) == 1


def test_block_cache_changes_are_returned_once_in_order():
    cache = BlockCache(2)
    serve(cache, "ab")
    serve(cache, "c")
    assert cache.changes() == [
        IndexUpdate(UpdateKind.STORED, (b"a", b"b")),
        IndexUpdate(UpdateKind.REMOVED, (b"b",)),
        IndexUpdate(UpdateKind.STORED, (b"c",)),
    ]
    assert cache.changes() == []


def test_block_that_two_requests_computed_is_stored_once():
    cache = BlockCache(4)
    cache.take(1)
    cache.take(1)
    cache.store(chain("a"))
    cache.store(chain("a"))
    assert cache.changes() == [IndexUpdate(UpdateKind.STORED, (b"a",))]
    cache.release(chain("a"))
    assert cache.room == 3
    cache.release(chain("a"))
    assert cache.room == 4


def test_hit_rates_of_a_tiny_trace_are_as_computed_by_hand():
    # abc: nothing. abd: a, b. xy: nothing; d and b leave (c did for d). abc: a. Of 11 blocks 3 hit with three blocks.
    trace = [chain(text) for text in ("abc", "abd", "xy", "abc")]
    pooled = pooled_lru(trace, 3)
    assert (pooled.hits, pooled.blocks) == (3, 11)
    assert pooled_lru(trace, 11).hits == infinite_cache(trace).hits == 5
    assert pooled_lru(trace, 11).share == pytest.approx(5 / 11)


def test_prompt_longer_than_the_cache_keeps_its_beginning():
    assert pooled_lru([chain("abcd"), chain("abcd")], 2).hits == 2


@given(st.lists(st.text("ab", max_size=6), max_size=30), st.integers(1, 8))
def test_block_cache_is_bounded_and_events_match_its_content(prompts, capacity):
    cache = BlockCache(capacity)
    for text in prompts:
        # Digests of a chain depend on all that came before.
        blocks = [text[: end + 1].encode() for end in range(len(text))][:capacity]
        matched = cache.match(blocks)
        cache.hold(blocks[:matched])
        cache.take(len(blocks) - matched)
        cache.store(blocks, matched)
        cache.release(blocks)
        assert cache.cached <= capacity
        assert cache.match(blocks) == len(blocks)
    index: set[bytes] = set()
    for update in cache.changes():
        (index.update if update.kind is UpdateKind.STORED else index.difference_update)(update.hashes)
    assert len(index) == cache.cached
    assert all(cache.match([block]) for block in index)
