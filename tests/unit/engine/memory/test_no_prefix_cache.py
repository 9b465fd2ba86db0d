import pytest

from tandem_engine.base.names import PageId
from tandem_engine.memory.prefix_cache import NoPrefixCache
from tandem_engine.messages.kv_events import AllCleared


def test_insert_adopts_nothing_and_nothing_is_ever_matched() -> None:
    cache = NoPrefixCache()
    result = cache.insert([1, 2, 3, 4], [PageId(1), PageId(2)])
    assert (result.pages, result.duplicates) == ((), ())
    assert cache.match([1, 2, 3, 4]).pages == ()
    assert cache.peek([1, 2, 3, 4]) == 0
    assert [*cache.pages()] == []


def test_disabled_cache_has_no_evictable_pages_and_no_events() -> None:
    cache = NoPrefixCache()
    assert cache.evictable_pages() == 0
    assert cache.evict(3) == cache.clear() == []
    assert cache.take_events() == []
    assert cache.snapshot_events() == [AllCleared()]


def test_locks_are_given_back_exactly_once() -> None:  # [lock-released-once]
    cache = NoPrefixCache()
    lock = cache.match([1]).lock
    assert cache.audit([]) == ["1 locks are out, requests hold 0"]
    cache.unlock(lock)
    assert cache.audit([]) == []
    with pytest.raises(AssertionError, match="released twice"):
        cache.unlock(lock)
