"""States in host memory: when they go there, what a match finds of them, and what they take along."""

import pytest

from tandem_engine.config import HostConfig, WritePolicy
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.audit import check_conservation
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import DIGEST_BYTES, HostPool
from tandem_engine.memory.host.storage import HostStorage
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyKind, CopyQueue
from tandem_engine.memory.pinned_prefix import PinnedPrefix
from tandem_engine.memory.request_anchors import StateMoves
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.kv_events import BASE_SPACE, Tier
from tandem_testing.memory_events import TierReader
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.tier_builders import PAGE_BYTES, HeldCopies

PAGE = 16
PARTS = 3
"""Host pages of a state."""
SLOT = 5
"""Of the first anchor."""
PROMPT = [*range(100)]
"""Its anchor is after 64 tokens."""
OTHER = [*range(1000, 1100)]


class Hybrid:
    """Memory of a model with states, around copies that a test runs."""

    def __init__(
        self,
        policy: WritePolicy = WritePolicy.WRITE_BACK,
        *,
        slots: int = 3,
        pages: int = 20,
        host_pages: int = 60,
        storage: HostStorage | None = None,
    ) -> None:
        self.device = HeldCopies()
        copies = CopyQueue(submit=self.device)
        anchors = StateAnchors(range(SLOT, SLOT + slots), page_size=PAGE, slot_bytes=1024)
        self.host = HostMemory.build(
            HostPool(num_pages=host_pages, page_bytes=PAGE_BYTES),
            copies,
            HostConfig(enable_cache=True, write_policy=policy),
            page_size=PAGE,
            storage=storage,
            state_pages=PARTS,
            anchors=anchors,
        )
        assert self.host.cache is not None
        self.cache = self.host.cache
        self.memory = KvMemory(
            rows=ReqToTokenPool(4, 50),
            allocator=PageAllocator(pages + 1, copies, [anchors]),
            cache=self.cache,
            page_size=PAGE,
            copies=copies,
            host=self.host,
            stateful=True,
            anchors=anchors,
        )

    def begin(self, tokens: list[int], *, with_state: bool = True) -> RequestKv:
        kv = self.memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
        assert kv is not None
        assert self.memory.ensure(kv, len(tokens))
        self.memory.load_back(kv, tokens, with_state=with_state)
        return kv

    def compute(self, kv: RequestKv, tokens: list[int]) -> StateMoves:
        """All that `kv` lacks of `tokens`, in one step."""
        step = self.memory.last_settled + 1
        moves = self.memory.state_moves(step, [kv], [kv.committed_len], [len(tokens)])
        self.memory.settled(step)
        self.memory.commit(kv, len(tokens))
        return moves

    def serve(self, tokens: list[int]) -> StateMoves:
        kv = self.begin(tokens)
        moves = self.compute(kv, tokens)
        self.memory.release(kv, tokens, checkpoint=True, after_step=None)
        return moves

    def turn(self) -> None:
        self.memory.poll()
        self.device.run()
        self.memory.poll()

    def evict_device(self) -> None:
        pages = self.memory.reserve_pages(self.memory.available_pages())
        assert pages is not None
        self.memory.give_back(pages)
        self.turn()

    def copied(self, kind: CopyKind) -> list[tuple[int, ...]]:
        """Sources of the copies of a kind, in order."""
        return [tuple(copy.source) for copy in self.device.seen if copy.kind is kind]

    def matched(self, tokens: list[int]) -> int:
        """Tokens that a request would not have to compute."""
        kv = self.memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
        assert kv is not None
        matched = kv.matched_len
        self.memory.release(kv, (), checkpoint=False, after_step=None)
        return matched

    def audited(self, *kvs: RequestKv) -> None:
        assert check_conservation(self.memory, kvs, ()).problems == ()


def parts_of(slot: int) -> tuple[int, ...]:
    return tuple(range(slot * PARTS, (slot + 1) * PARTS))


@pytest.mark.parametrize(
    ("policy", "served", "backed_up"),
    [
        (WritePolicy.WRITE_THROUGH, 1, True),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 1, False),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 2, True),
        (WritePolicy.WRITE_BACK, 2, False),
    ],
)
def test_state_is_copied_to_host_per_write_policy(policy, served, backed_up):
    hybrid = Hybrid(policy)
    for _ in range(served):
        hybrid.serve(PROMPT)
    hybrid.turn()
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == ([parts_of(SLOT)] if backed_up else [])
    hybrid.audited()


LONG = [*range(700)]
"""Its anchor is after 640 tokens, the provisional ones after 128, 320 and 512."""
BRANCH = [*LONG[:600], *range(5000, 5040)]


@pytest.mark.parametrize("policy", WritePolicy)
def test_trial_state_is_not_backed_up(policy):
    hybrid = Hybrid(policy, slots=12, pages=90, host_pages=200)
    hybrid.serve(LONG)
    assert hybrid.memory.anchors is not None
    assert hybrid.memory.anchors.counts.provisional == 3
    for _ in range(6):
        hybrid.turn()
    hybrid.evict_device()
    assert len(hybrid.copied(CopyKind.STATE_TO_HOST)) == (policy is not WritePolicy.WRITE_THROUGH_SELECTIVE)
    assert hybrid.matched(BRANCH) == 0
    hybrid.audited()


@pytest.mark.parametrize("policy", WritePolicy)
def test_former_trial_state_is_offloaded_and_restored(policy):
    hybrid = Hybrid(policy, slots=12, pages=90, host_pages=200)
    hybrid.serve(LONG)
    hybrid.serve(BRANCH)
    for _ in range(6):
        hybrid.turn()
    hybrid.audited()
    hybrid.evict_device()
    assert hybrid.matched([*LONG[:560], 0]) == 512
    kv = hybrid.begin([*LONG[:560], 0])
    assert (kv.committed_len, kv.continues_from) == (512, None)
    hybrid.audited(kv)


def test_trial_that_makes_room_is_not_backed_up():
    hybrid = Hybrid(slots=4, pages=60)
    hybrid.serve(LONG)
    for first in range(1000, 4000, 1000):
        hybrid.serve([*range(first, first + 70)])
    assert hybrid.memory.anchors is not None
    assert (hybrid.memory.anchors.counts.provisional, hybrid.memory.anchors.counts.replaced) == (0, 1)
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == []
    hybrid.audited()


def test_state_leaves_the_device_with_its_block_and_returns():
    hybrid = Hybrid()
    hybrid.serve(PROMPT)
    hybrid.evict_device()
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == [parts_of(SLOT)]
    assert hybrid.matched(PROMPT) == 64
    kv = hybrid.begin(PROMPT)
    assert (kv.committed_len, kv.continues_from) == (64, None)
    [load] = [copy for copy in hybrid.device.seen if copy.kind is CopyKind.HOST_TO_STATE]
    assert tuple(load.target) == parts_of(kv.row)
    hybrid.audited(kv)
    # The device has it at an anchor again, from the step that begins with it.
    [(row, slot)] = hybrid.compute(kv, PROMPT).copies
    assert row == kv.row
    hybrid.memory.release(kv, PROMPT, checkpoint=True, after_step=None)
    hybrid.turn()
    assert hybrid.serve(PROMPT).copies[0][0] == slot
    assert len(hybrid.copied(CopyKind.HOST_TO_STATE)) == 1
    hybrid.audited()


def test_state_is_copied_before_another_gets_its_slot():
    hybrid = Hybrid(slots=1)
    hybrid.serve(PROMPT)
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == []
    kv = hybrid.begin(OTHER)
    [snapshot] = hybrid.compute(kv, OTHER).snapshots
    assert snapshot.slot == SLOT
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == [parts_of(SLOT)]
    hybrid.audited(kv)


def test_blocks_on_the_device_continue_at_a_state_below():
    hybrid = Hybrid(slots=1)
    hybrid.serve(PROMPT)
    hybrid.serve(OTHER)
    hybrid.turn()
    kv = hybrid.begin(PROMPT)
    assert (kv.committed_len, kv.loaded.host, kv.continues_from) == (64, 0, None)
    assert len(hybrid.copied(CopyKind.HOST_TO_STATE)) == 1
    hybrid.audited(kv)


def test_match_ends_at_the_deepest_state_of_both_tiers():
    long = [*range(300)]
    hybrid = Hybrid(pages=40, host_pages=100)
    hybrid.serve(PROMPT)
    hybrid.serve(long)
    assert hybrid.matched(long) == 256
    hybrid.evict_device()
    assert hybrid.matched(long) == 256
    assert hybrid.matched(long[:256]) == 64
    assert hybrid.matched([*long[:200], *OTHER]) == 64
    hybrid.audited()


def test_state_that_lacks_a_part_is_not_continued_from():
    hybrid = Hybrid()
    hybrid.serve(PROMPT)
    hybrid.evict_device()
    [part] = [block for block in hybrid.host.tier.blocks if block.digest.endswith(b"\0\0\0\2")]
    page = hybrid.host.tier.blocks.drop(part)
    assert page is not None
    hybrid.host.tier.pages.free_cached(page)
    assert hybrid.matched(PROMPT) == 0
    hybrid.audited()


def test_block_that_host_memory_evicts_takes_its_state_along():
    hybrid = Hybrid(host_pages=12)
    for first in range(0, 3000, 1000):
        hybrid.serve([*range(first, first + 100)])
        hybrid.evict_device()
        hybrid.audited()
    keys = {block.digest for block in hybrid.host.tier.blocks}
    assert {key[:DIGEST_BYTES] for key in keys if len(key) > DIGEST_BYTES} <= keys
    assert hybrid.matched([*range(2000, 2100)]) == 64


def test_state_without_room_leaks_no_page():
    hybrid = Hybrid(host_pages=PARTS - 1)
    hybrid.serve(PROMPT)
    hybrid.evict_device()
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == []
    assert hybrid.matched(PROMPT) == 0
    hybrid.audited()


def test_request_that_gets_its_state_otherwise_loads_none():
    hybrid = Hybrid()
    hybrid.serve(PROMPT)
    hybrid.evict_device()
    kv = hybrid.begin(PROMPT, with_state=False)
    hybrid.memory.expect_state(kv)
    assert (kv.committed_len, hybrid.copied(CopyKind.HOST_TO_STATE)) == (64, [])
    assert hybrid.memory.open_to_peers
    hybrid.turn()
    hybrid.audited(kv)


def test_state_is_sent_only_once_it_is_loaded():  # [settled-only-sent]
    """For every user of the prefix: its anchor is attached when the load is queued."""
    hybrid = Hybrid(slots=1)
    hybrid.serve(PROMPT)
    hybrid.serve(OTHER)
    hybrid.turn()
    first, second = (
        PinnedPrefix.of(hybrid.memory, PROMPT[:64], space=BASE_SPACE, spare_pages=4, with_state=True) for _ in range(2)
    )
    assert len(hybrid.copied(CopyKind.HOST_TO_STATE)) == 1
    assert (first.tokens, first.state) == (second.tokens, second.state) == (64, SLOT)
    assert (first.readable, second.readable) == (False, False)
    hybrid.turn()
    assert (first.readable, second.readable) == (True, True)
    for prefix in (first, second):
        prefix.give_back()
    hybrid.audited()


def test_block_without_a_state_costs_one_lookup(monkeypatch):
    """A state may have thousands of parts, and a prompt as many blocks that end without one."""
    hybrid = Hybrid(slots=1)
    hybrid.serve(PROMPT)
    hybrid.evict_device()
    seen: list[bytes] = []
    blocks = hybrid.host.tier.blocks
    found = blocks.get
    monkeypatch.setattr(blocks, "get", lambda key: seen.append(key) or found(key))
    long = [*PROMPT[:64], *range(5000, 5064)]
    assert hybrid.matched(long) == 64
    hybrid.host.tier.blocks.drop(next(each for each in blocks if each.digest.endswith(b"\0\0\0\1")))
    seen.clear()
    assert hybrid.matched(long) == 0
    assert [key[DIGEST_BYTES:] for key in seen if len(key) > DIGEST_BYTES] == [b"\0\0\0\1"]


def test_backups_of_anchors_hold_up_no_peer():
    hybrid = Hybrid(WritePolicy.WRITE_THROUGH)
    hybrid.serve(PROMPT)
    hybrid.memory.poll()
    assert hybrid.copied(CopyKind.STATE_TO_HOST) == [parts_of(SLOT)]
    assert not hybrid.memory.copies.idle
    assert hybrid.memory.open_to_peers
    landing = hybrid.memory.reserve_state()
    assert landing is not None
    assert not hybrid.memory.untouched(landing[1])
    hybrid.turn()
    assert hybrid.memory.untouched(landing[1])
    hybrid.memory.give_back_state(landing[0])
    hybrid.audited()


def test_request_begins_again_at_a_state_in_host_memory():
    hybrid = Hybrid(slots=1)
    kv = hybrid.begin(PROMPT)
    hybrid.compute(kv, PROMPT)
    hybrid.memory.checkpoint(kv, PROMPT)
    hybrid.serve(OTHER)
    again = hybrid.memory.begin_again(kv, [*PROMPT, 7], max_match=100)
    assert (again.committed_len, again.slower) == (64, None)
    assert len(hybrid.copied(CopyKind.HOST_TO_STATE)) == 1
    hybrid.audited(again)


def test_events_name_no_parts_of_states():
    storage = MemoryStorage()
    hybrid = Hybrid(WritePolicy.WRITE_THROUGH, storage=storage)
    hybrid.serve(PROMPT)
    hybrid.turn()
    hybrid.turn()
    assert any(len(key) > DIGEST_BYTES for key in storage.hashes())
    for events in (hybrid.cache.take_events(), hybrid.cache.snapshot_events()):
        tiers = TierReader().read(events).tiers
        assert {len(digest) for tier in (Tier.HOST, Tier.DISK) for digest in tiers[tier]} == {DIGEST_BYTES}


def test_prefix_is_read_from_storage_up_to_its_last_state():
    storage = MemoryStorage()
    before = Hybrid(WritePolicy.WRITE_THROUGH, storage=storage)
    before.serve(PROMPT)
    before.turn()
    before.turn()
    hybrid = Hybrid(storage=storage)
    assert hybrid.cache.prefetch(PROMPT[:60], space=BASE_SPACE, max_tokens=59, until=1.0) is None
    prefetch = hybrid.cache.prefetch(PROMPT, space=BASE_SPACE, max_tokens=99, until=1.0)
    assert prefetch is not None
    assert len(prefetch.blocks) == 64 // PAGE + PARTS
    hybrid.memory.poll()
    assert prefetch.done
    assert hybrid.matched(PROMPT) == 64
    hybrid.audited()
