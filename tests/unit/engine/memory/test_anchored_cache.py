"""Block events of a model with states: what they name can be continued, and nothing else is named."""

import random

import pytest

from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.anchored_cache import AnchoredCache
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.kv_events import (
    BASE_SPACE,
    AllCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    chain_hashes,
)
from tandem_testing.memory_builders import copy_at_once

PAGE = 16


class Router:
    """An engine's memory, and what a router makes of its events."""

    def __init__(self, *, slots: int = 3, pages: int = 60) -> None:
        self.anchors = StateAnchors(range(5, 5 + slots), page_size=PAGE, slot_bytes=1024)
        self.cache = AnchoredCache(PAGE, self.anchors)
        self.memory = KvMemory(
            rows=ReqToTokenPool(4, 50),
            allocator=PageAllocator(pages, None, [self.anchors]),
            cache=self.cache,
            page_size=PAGE,
            copies=CopyQueue(submit=copy_at_once),
            stateful=True,
            anchors=self.anchors,
        )
        self.known: set[bytes] = set()

    def compute(self, tokens: list[int], *, decodes: int = 0) -> None:
        """A request of `tokens` and so many more, from its beginning to its end."""
        kv = self.memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
        assert kv is not None
        output = [*tokens, *range(900, 900 + decodes)]
        self._step(kv, output, kv.committed_len, len(tokens))
        for start in range(len(tokens), len(output)):
            self._step(kv, output, start, start + 1)
        self.memory.release(kv, output, checkpoint=True, after_step=None)

    def _step(self, kv: RequestKv, tokens: list[int], start: int, stop: int) -> None:
        assert self.memory.ensure(kv, stop)
        step = self.memory.last_settled + 1
        self.memory.state_moves(step, [kv], [start], [stop])
        self.memory.settled(step)
        self.memory.commit(kv, stop)
        self.memory.checkpoint(kv, tokens[:stop])

    def read_events(self) -> list[KvEvent]:
        events = self.cache.take_events()
        for event in events:
            assert not isinstance(event, AllCleared)
            hashes = {*event.hashes}
            if isinstance(event, BlockStored):
                assert not hashes & self.known
                self.known |= hashes
            else:
                assert hashes <= self.known
                self.known -= hashes
        return events

    def found(self, tokens: list[int]) -> int:
        """Leading blocks of `tokens` that it would route by."""
        hashes = chain_hashes(tokens, PAGE, parent=BASE_SPACE.seed)
        return next((n for n, digest in enumerate(hashes) if digest not in self.known), len(hashes))

    def usable(self, tokens: list[int]) -> int:
        return self.cache.peek(tokens)

    def leading_to_anchors(self) -> set[bytes]:
        """The hashes of all blocks at or before an anchor, from the tree as it is."""
        found: set[bytes] = set()
        for node in self.cache._nodes():
            path = [*reversed([*node.lineage()])]
            pages = [page for part in path for page in part.pages]
            hashes = [digest for part in path if part.pages for digest in part.chain()]
            ends = [n for n, page in enumerate(pages, 1) if page in self.anchors._slot_of]
            found.update(hashes[: max(ends, default=0)])
        return found


def test_blocks_after_the_last_anchor_are_not_announced():
    router = Router()
    tokens = [*range(100)]
    router.compute(tokens)
    assert sum(len(event.hashes) for event in router.read_events()) == 4
    assert router.found(tokens) == router.usable(tokens) == 4


def test_prompt_without_an_anchor_is_not_announced():
    router = Router()
    router.compute([*range(60)])
    assert router.read_events() == []
    assert router.found([*range(60)]) == 0


def test_output_that_passes_a_boundary_is_announced_up_to_it():
    router = Router()
    router.compute([*range(100)], decodes=40)
    router.read_events()
    assert router.found([*range(100), *range(900, 940)]) == 8


def test_anchor_without_its_slot_takes_its_blocks_back():
    router = Router(slots=1)
    first, second = [*range(100)], [*range(500, 600)]
    router.compute(first)
    router.read_events()
    router.compute(second)
    events = router.read_events()
    assert [type(event) for event in events] == [BlockRemoved, BlockStored]
    assert (router.found(first), router.found(second)) == (0, 4)


def test_blocks_before_another_anchor_stay_announced():
    """Two continuations of one beginning: the end of one leaves what the other needs."""
    router = Router(slots=3)
    shared = [*range(64)]
    first, second = [*shared, *range(100, 170)], [*shared, *range(200, 270)]
    router.compute(first)
    router.compute(second)
    router.read_events()
    assert (router.found(first), router.found(second)) == (8, 8)
    router.compute([*range(500, 600)])
    router.read_events()
    assert (router.found(first), router.found(second), router.usable(shared)) == (4, 8, 4)


def test_trial_that_made_room_takes_back_no_block():
    """Its prompt is announced up to the anchor at its end; the engine continues at most a trial's distance before."""
    router = Router(slots=8, pages=100)
    prompt = [*range(700)]
    router.compute(prompt)
    router.read_events()
    parted = [*prompt[:600], *range(9000, 9060)]
    assert (router.found(parted), router.usable(parted)) == (37, 32)
    for first in range(1000, 8000, 1000):
        router.compute([*range(first, first + 70)])
        assert not any(isinstance(event, BlockRemoved) for event in router.read_events())
        assert router.known == router.leading_to_anchors()
    assert router.anchors.counts.provisional == 0
    assert (router.found(prompt), router.usable(prompt), router.usable(parted)) == (40, 40, 0)


def test_eviction_removes_announced_anchor_blocks():
    router = Router(pages=12)
    router.compute([*range(100)])
    router.read_events()
    router.compute([*range(500, 640)])
    router.read_events()
    assert router.found([*range(100)]) == 0
    assert router.known == router.leading_to_anchors()


def test_replay_has_announced_blocks_only():
    router = Router()
    router.compute([*range(200)])
    router.read_events()
    cleared, stored = router.cache.snapshot_events()
    assert isinstance(cleared, AllCleared)
    assert isinstance(stored, BlockStored)
    assert stored.hashes == tuple(chain_hashes([*range(192)], PAGE, parent=BASE_SPACE.seed))
    router.memory.clear_cache()
    router.read_events()
    assert (router.known, len(router.cache.snapshot_events())) == (set(), 1)


@pytest.mark.parametrize("seed", range(6))
def test_router_index_has_blocks_up_to_anchors_at_any_time(seed):
    """Prompts that share beginnings, with too few slots and pages for all."""
    rng = random.Random(seed)
    router = Router(slots=rng.choice([1, 2, 5, 12]), pages=rng.choice([32, 40, 80]))
    prompts: list[list[int]] = [[]]
    for _ in range(60):
        base = rng.choice(prompts)
        prompt = [*base[: rng.randrange(len(base) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(1, 300)))]
        prompt = prompt[:450]
        prompts.append(prompt)
        router.compute(prompt, decodes=rng.choice([0, 0, 30]))
        if rng.random() < 0.7:
            router.read_events()
            assert router.known == router.leading_to_anchors()
            for each in prompts[-10:]:
                assert router.found(each) >= router.usable(each)
