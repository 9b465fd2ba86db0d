import pytest

from tandem_engine.config import WritePolicy
from tandem_engine.memory.allocator import Writer
from tandem_engine.memory.page_copies import CopyKind
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, Tier
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.tier_builders import make_tiers

PROMPT = [*range(1, 14)]
"""Three whole pages and a token."""
OTHER = [*range(50, 63)]
OUT, BACK = CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE


def test_write_through_copies_new_blocks_at_next_iteration():  # [backup-queued]
    tiers = make_tiers(WritePolicy.WRITE_THROUGH)
    tiers.serve(PROMPT)
    assert tiers.device.pages(OUT) == 0
    tiers.memory.poll()
    assert tiers.device.pages(OUT) == 3
    tiers.turn()
    tiers.evict_device()
    assert tiers.device.pages(OUT) == 3
    tiers.check()


def test_write_back_copies_blocks_on_eviction():
    tiers = make_tiers(WritePolicy.WRITE_BACK)
    tiers.serve(PROMPT)
    tiers.turn()
    assert tiers.device.pages(OUT) == 0
    tiers.evict_device()
    assert tiers.device.pages(OUT) == 3


def test_selective_write_through_waits_for_a_second_request():
    tiers = make_tiers(WritePolicy.WRITE_THROUGH_SELECTIVE)
    tiers.serve(PROMPT)
    tiers.serve(OTHER)
    tiers.turn()
    assert tiers.device.pages(OUT) == 0
    kv = tiers.admit([*PROMPT, 99])
    tiers.memory.poll()
    assert tiers.device.pages(OUT) == 3
    tiers.memory.release(kv, (), checkpoint=False, after_step=None)
    tiers.turn()
    tiers.evict_device()
    assert len(tiers.known(Tier.HOST)) == 3


def test_request_that_is_not_admitted_is_no_hit():
    tiers = make_tiers(WritePolicy.WRITE_THROUGH_SELECTIVE)
    tiers.serve(PROMPT)
    for _ in range(3):
        kv = tiers.memory.begin([*PROMPT, 99], space=BASE_SPACE, max_match=13)
        tiers.memory.release(kv, (), checkpoint=False, after_step=None)
    tiers.turn()
    assert tiers.device.pages(OUT) == 0


def test_large_backup_is_spread_over_turns(monkeypatch):
    monkeypatch.setattr("tandem_engine.memory.host.tiered_cache.BACKUP_BYTES", 32)
    tiers = make_tiers(WritePolicy.WRITE_THROUGH)
    tiers.serve(PROMPT)
    tiers.memory.poll()
    assert tiers.device.pages(OUT) == 2
    tiers.memory.poll()
    assert tiers.device.pages(OUT) == 3


@pytest.mark.parametrize("policy", WritePolicy)
def test_evicted_block_is_backed_up_if_policy_requires_it(policy):
    tiers = make_tiers(policy)
    tiers.serve(PROMPT)
    tiers.evict_device()
    assert tiers.device.pages(OUT) == (0 if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 3)
    tiers.turn()
    assert tiers.memory.cached_len(PROMPT, space=BASE_SPACE, max_match=12) == 0
    tiers.check()


def test_evicted_page_is_free_for_peer_writes_after_its_copy():  # [copy-acked] [page-fence]
    tiers = make_tiers()
    tiers.serve(PROMPT)
    kv = tiers.memory.begin([9], space=BASE_SPACE, max_match=0)
    assert tiers.memory.ensure(kv, 6 * 4)
    assert tiers.memory.reserve_pages(2, Writer.PEER) is None
    assert tiers.memory.ensure(kv, 7 * 4)
    tiers.device.run()
    tiers.memory.poll()
    assert tiers.memory.reserve_pages(1, Writer.PEER) is not None


def test_prefix_match_continues_in_host_tier_and_is_loaded():
    tiers = make_tiers()
    tiers.serve(PROMPT)
    tiers.evict_device()
    kv = tiers.admit(PROMPT)
    assert kv.committed_len == kv.cache_protected_len == kv.computed_from == 12
    assert kv.loaded == (3, 0)
    assert tiers.device.pages(BACK) == 3
    tiers.check(kv)
    other = tiers.memory.begin([*PROMPT, 1], space=BASE_SPACE, max_match=13)
    assert other.committed_len == 12
    assert not tiers.memory.readable(kv)
    assert not tiers.memory.readable(other)
    tiers.turn()
    assert tiers.memory.readable(kv)
    assert tiers.memory.readable(other)


def test_match_takes_the_device_first():
    tiers = make_tiers()
    tiers.serve(PROMPT)
    tiers.evict_device()
    tiers.turn()
    tiers.serve(PROMPT[:9])
    before = tiers.device.pages(BACK)
    kv = tiers.admit(PROMPT)
    assert kv.committed_len == 12
    assert tiers.device.pages(BACK) - before == 1
    tiers.check(kv)


def test_cap_on_a_match_holds_in_every_tier():  # [one-token-computed]
    tiers = make_tiers()
    tiers.serve(PROMPT)
    tiers.evict_device()
    assert tiers.matched(PROMPT[:12], at_most=11) == 8


def test_prefix_cached_under_one_salt_is_not_found_under_another():
    tiers = make_tiers()
    tiers.serve(PROMPT, space=CacheSpace("a"))
    tiers.evict_device()
    assert tiers.matched(PROMPT, at_most=12, space=CacheSpace("b")) == 0


def test_matched_host_blocks_survive_device_eviction_for_them():  # [pinned-host-block]
    tiers = make_tiers(device_pages=4, host_pages=3)
    tiers.serve(PROMPT)
    tiers.evict_device()
    tiers.turn()
    tiers.serve(OTHER)
    tiers.turn()
    kv = tiers.admit(PROMPT)
    assert kv.committed_len == 12
    assert tiers.host.tier.blocks.evictable == 0
    tiers.turn()
    tiers.check(kv)


def test_evicted_block_without_host_space_emits_removal():  # [backup-result]
    tiers = make_tiers(host_pages=2)
    tiers.serve(PROMPT)
    assert len(tiers.known(Tier.DEVICE)) == 3
    tiers.evict_device()
    assert tiers.known(Tier.DEVICE) == set()
    assert len(tiers.known(Tier.HOST)) == len(tiers.events.anywhere) == 2
    assert tiers.host.tier.blocks.evictable == 0
    tiers.check()


def test_host_pool_smaller_than_device_pool_accepts_new_blocks():  # [mirror-reclaimable]
    tiers = make_tiers(WritePolicy.WRITE_THROUGH, device_pages=16, host_pages=3)
    for start in range(0, 80, 20):
        tiers.serve([*range(start, start + 9)])
        tiers.turn()
    assert tiers.device.pages(OUT) == 8
    assert tiers.host.tier.blocks.evictable == 3


def test_prefix_is_evicted_from_its_end():
    tiers = make_tiers(host_pages=3)
    tiers.serve(PROMPT)
    tiers.evict_device()
    tiers.turn()
    tiers.serve(OTHER[:5])
    tiers.evict_device()
    tiers.turn()
    assert tiers.matched(PROMPT, at_most=12) == 8


def test_cleared_cache_has_no_prefix_on_device_host_or_disk():
    storage = MemoryStorage()
    tiers = make_tiers(WritePolicy.WRITE_THROUGH, storage=storage)
    tiers.serve(PROMPT)
    tiers.turn()
    tiers.memory.poll()
    assert len(storage) == 3
    tiers.serve(OTHER)
    tiers.memory.clear_cache()
    tiers.turn()
    assert tiers.matched(PROMPT, at_most=12) == 0
    assert len(storage) == 0
    assert tiers.known(Tier.HOST) == tiers.known(Tier.DISK) == tiers.events.anywhere == set()
    assert tiers.host.tier.pages.available == 16


def test_storage_restores_blocks_lost_on_device_and_host():
    storage = MemoryStorage()
    tiers = make_tiers(WritePolicy.WRITE_BACK, host_pages=4, storage=storage)
    tiers.serve(PROMPT)
    tiers.evict_device()
    tiers.turn()
    tiers.memory.poll()
    tiers.serve([*range(100, 117)])
    tiers.evict_device()
    tiers.turn()
    assert tiers.matched(PROMPT, at_most=12) == 0
    prefetch = tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    assert not prefetch.done
    tiers.memory.poll()
    assert prefetch.done
    kv = tiers.admit(PROMPT)
    assert kv.committed_len == 8  # half of host memory is the most that one request may have read
    assert kv.loaded == (0, 2)
    tiers.check(kv)


def stored_before(prompt: list[int]) -> MemoryStorage:
    """What an engine left behind that served `prompt`."""
    storage = MemoryStorage()
    tiers = make_tiers(WritePolicy.WRITE_THROUGH, storage=storage)
    tiers.serve(prompt)
    tiers.turn()
    tiers.memory.poll()
    return storage


def test_block_that_storage_lost_is_no_match():
    storage = stored_before(PROMPT)
    storage.lost = {[*storage.hashes()][1]}
    tiers = make_tiers(storage=storage)
    tiers.events.read(tiers.memory.cache.snapshot_events())
    assert len(tiers.known(Tier.DISK)) == 3
    prefetch = tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    tiers.memory.poll()
    assert prefetch.done
    assert tiers.matched(PROMPT, at_most=12) == 4
    assert len(tiers.known(Tier.DISK)) == 2
    assert tiers.host.tier.traffic.misses == 1
    assert tiers.host.tier.pages.available == 14


def test_blocks_being_read_from_storage_do_not_match():
    storage = stored_before(PROMPT)
    storage.at_once = False
    tiers = make_tiers(storage=storage)
    prefetch = tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    again = tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    assert [*again.blocks] == [*prefetch.blocks]
    tiers.memory.poll()
    assert tiers.matched(PROMPT, at_most=12) == 0
    storage.run()
    tiers.memory.poll()
    assert tiers.matched(PROMPT, at_most=12) == 12


def test_block_computed_while_read_is_on_both_tiers():
    storage = stored_before(PROMPT)
    storage.at_once = False
    tiers = make_tiers(storage=storage)
    tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    tiers.serve(PROMPT)
    storage.run()
    tiers.turn()
    assert tiers.known(Tier.DEVICE) == tiers.known(Tier.HOST)
    tiers.evict_device()
    assert len(tiers.events.read(tiers.memory.cache.take_events()).anywhere) == 3
    tiers.check()


def test_writes_to_storage_are_limited_to_what_may_be_pinned(monkeypatch):
    monkeypatch.setattr("tandem_engine.memory.host.storage.MAX_WRITES", 2)
    storage = MemoryStorage(at_once=False)
    tiers = make_tiers(WritePolicy.WRITE_THROUGH, storage=storage)
    tiers.serve(PROMPT)
    tiers.turn()
    assert tiers.host.tier.traffic.not_stored == 1
    assert tiers.host.tier.blocks.evictable == 1
    storage.run()
    tiers.turn()
    assert len(storage) == 2
    assert tiers.host.tier.blocks.evictable == 3


def test_flush_drops_blocks_in_storage_transfer():
    storage = stored_before(PROMPT)
    storage.at_once = False
    tiers = make_tiers(WritePolicy.WRITE_THROUGH, storage=storage)
    tiers.events.read(tiers.memory.cache.snapshot_events())
    tiers.serve(OTHER)
    tiers.turn()
    tiers.host.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=12, until=0.0)
    tiers.memory.clear_cache()
    storage.run()
    tiers.turn()
    assert tiers.known(Tier.DISK) == tiers.known(Tier.HOST) == set()
    assert tiers.host.tier.pages.available == 16
    tiers.check()
