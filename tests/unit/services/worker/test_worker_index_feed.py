"""The feed against an index in memory that follows the rules of scripts/index.lua."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch, Tier
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.index import Applied, IndexUpdate, UpdateKind, sampling_of
from tandem_services.worker import index_publisher
from tandem_services.worker.index_publisher import CHUNK_HASHES, IndexFeed
from tandem_testing.service_clock import ServiceClock


class IndexInMemory:
    """`answers`: per call, whether it arrives and whether its answer does; after them everything works."""

    def __init__(self, answers: Sequence[str] = ()) -> None:
        self.blocks: set[bytes] = set()
        self.in_host: set[bytes] = set()
        self.revision = -1
        self.answers = list(answers)
        self.calls: list[int] = []
        self.named_again: list[bytes] = []

    async def apply(
        self, incarnation: str, updates: Sequence[IndexUpdate], *, page_size: int, builds_on: int, revision: int
    ) -> Applied:
        self.calls.append(sum(len(update.hashes) for update in updates))
        fate = self.answers.pop(0) if self.answers else "fine"
        if fate == "wiped":
            self.blocks, self.revision = set(), -1
        if fate == "lost":
            raise RedisUnavailableError("lost")
        outcome = self._apply(updates, builds_on, revision)
        if fate == "unanswered":
            raise RedisUnavailableError("unanswered")
        return outcome

    def _apply(self, updates: Sequence[IndexUpdate], builds_on: int, revision: int) -> Applied:
        if self.revision == revision:
            return Applied.REPEATED
        if updates[0].kind is not UpdateKind.CLEARED and self.revision != builds_on:
            return Applied.GAP
        for update in updates:
            match update.kind:
                case UpdateKind.CLEARED:
                    self.blocks, self.in_host = set(), set()
                case UpdateKind.STORED:
                    self.blocks |= set(update.hashes)
                case UpdateKind.REMOVED:
                    self.blocks -= set(update.hashes)
                case UpdateKind.HOST_ALONE:
                    self.in_host |= set(update.hashes)
                case UpdateKind.ON_DEVICE:
                    self.in_host -= set(update.hashes)
                case UpdateKind.NAMED_AGAIN:
                    self.named_again += update.hashes
        self.revision = revision
        return Applied.APPLIED


class Engine:
    """Publishes to the feed, and answers a replay at once."""

    def __init__(self, index: IndexInMemory) -> None:
        self.blocks: dict[bytes, None] = {}
        self.sequence = 0
        self.clock = ServiceClock()
        self.feed = IndexFeed(
            index=index,
            incarnation="w@1",
            page_size=lambda: 16,
            clock=self.clock,
            ask_replay=self.replay,
            reachable=lambda: True,
        )

    async def replay(self) -> None:
        self.publish(AllCleared(), BlockStored(hashes=tuple(self.blocks)))

    def store(self, *hashes: bytes, delivered: bool = True) -> None:
        self.blocks |= dict.fromkeys(hashes)
        self.publish(BlockStored(hashes=hashes), delivered=delivered)

    def remove(self, *hashes: bytes, delivered: bool = True) -> None:
        for each in hashes:
            self.blocks.pop(each, None)
        self.publish(BlockRemoved(hashes=hashes), delivered=delivered)

    def publish(self, *events: KvEvent, delivered: bool = True) -> None:
        self.sequence += 1
        if delivered:
            self.feed.accept(KvEventBatch(sequence=self.sequence, events=events))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(index_publisher, "PACE_S", 0)
    monkeypatch.setattr(index_publisher, "RETRY_S", 0)


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def settle(engine: Engine, index: IndexInMemory) -> None:
    """Run the feed until the index says what the engine has."""
    await run_until(engine, lambda: index.blocks == set(engine.blocks) and index.revision == engine.feed.acknowledged)


async def run_until(engine: Engine, done: Callable[[], bool]) -> None:
    task = asyncio.create_task(engine.feed.run())
    try:
        async with asyncio.timeout(60):
            while not done():  # noqa: ASYNC110 (two states, no event)
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_events_arrive_in_order():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(1), block(2))
    engine.remove(block(2))
    engine.store(block(3))
    await settle(engine, index)
    assert index.blocks == {block(1), block(3)}
    assert engine.feed.replays == 0


async def test_block_counts_while_device_or_host_memory_has_it():
    index = IndexInMemory()
    engine = Engine(index)
    engine.blocks = dict.fromkeys([block(1), block(2)])
    engine.publish(
        BlockStored(hashes=(block(1), block(2), block(3))),
        BlockStored(hashes=(block(1),), tier=Tier.HOST, elsewhere=True),
        BlockRemoved(hashes=(block(1),), elsewhere=True),
        BlockRemoved(hashes=(block(3),)),
        BlockStored(hashes=(block(4),), tier=Tier.DISK),
        BlockRemoved(hashes=(block(1),), tier=Tier.DISK),
    )
    await settle(engine, index)
    del engine.blocks[block(1)]
    engine.publish(BlockRemoved(hashes=(block(1),), tier=Tier.HOST))
    await settle(engine, index)


HELD = (Tier.DEVICE, Tier.HOST)
moves = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(HELD)), min_size=1, max_size=30)


@given(moves=moves, replay_after=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_index_marks_blocks_in_host_memory_only(moves, replay_after):
    """Each move stores a block in a tier, or removes it from there, marked as the engine's tiers mark it."""

    async def scenario() -> None:
        index = IndexInMemory()
        engine = Engine(index)
        held: dict[Tier, set[bytes]] = {tier: set() for tier in HELD}
        for step, (number, tier) in enumerate(moves):
            other = HELD[1 - HELD.index(tier)]
            here, elsewhere = block(number) in held[tier], block(number) in held[other]
            held[tier] ^= {block(number)}
            kind = BlockRemoved if here else BlockStored
            engine.publish(kind(hashes=(block(number),), tier=tier, elsewhere=elsewhere))
            if step == replay_after:
                on_device, in_host = held[Tier.DEVICE], held[Tier.HOST]
                engine.publish(
                    AllCleared(),
                    BlockStored(hashes=tuple(on_device)),
                    BlockStored(hashes=tuple(in_host & on_device), tier=Tier.HOST, elsewhere=True),
                    BlockStored(hashes=tuple(in_host - on_device), tier=Tier.HOST),
                )
        engine.blocks = dict.fromkeys(held[Tier.DEVICE] | held[Tier.HOST])
        await settle(engine, index)
        assert index.in_host == held[Tier.HOST] - held[Tier.DEVICE]

    asyncio.run(scenario())


async def test_index_of_previous_owner_is_cleared_first():
    index = IndexInMemory()
    index.blocks, index.revision = {block(99)}, 5
    engine = Engine(index)
    engine.store(block(1))
    await settle(engine, index)


async def test_missing_batch_leads_to_a_replay():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(1))
    engine.store(block(2), delivered=False)
    engine.store(block(3))
    await settle(engine, index)
    assert engine.feed.replays == 1


async def test_events_before_the_replay_are_ignored():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(1), delivered=False)
    engine.store(block(2))
    engine.remove(block(1))
    await settle(engine, index)
    assert index.blocks == {block(2)}
    assert engine.feed.replays == 1


async def test_lost_answer_is_repeated_and_counts_once():
    index = IndexInMemory(["unanswered", "lost", "unanswered"])
    engine = Engine(index)
    engine.store(block(1))
    await settle(engine, index)
    engine.store(block(2))
    await settle(engine, index)
    assert engine.feed.replays == 0


async def test_clear_after_an_unanswered_update_is_not_mistaken_for_it():
    index = IndexInMemory(["unanswered"])
    engine = Engine(index)
    engine.store(block(1))
    task = asyncio.create_task(engine.feed.run())
    while not index.calls:  # noqa: ASYNC110 (the fake has no event)
        await asyncio.sleep(0)
    engine.blocks.clear()
    engine.publish(AllCleared())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settle(engine, index)
    assert index.blocks == set()


async def test_heartbeat_that_finds_an_older_index_leads_to_a_replay():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(1))
    await settle(engine, index)
    before = engine.feed.acknowledged
    index.blocks, index.revision = set(), -1
    engine.feed.check(-1, before)
    await settle(engine, index)
    assert engine.feed.replays == 1


async def test_heartbeat_from_before_the_first_update_means_nothing():
    engine = Engine(IndexInMemory())
    engine.feed.check(-1, engine.feed.acknowledged)
    assert engine.feed.replays == 0
    engine.store(block(1))
    await settle(engine, engine.feed.index)
    assert engine.feed.replays == 0


async def test_large_caches_go_in_bounded_updates():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(*(block(n) for n in range(3 * CHUNK_HASHES + 5)))
    await settle(engine, index)
    assert max(index.calls) <= CHUNK_HASHES


async def test_index_replay_is_paced_and_new_events_are_immediate(monkeypatch):
    monkeypatch.setattr(index_publisher, "PACE_S", 1)
    pauses = []

    async def noted(seconds: float, sleep=asyncio.sleep) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(index_publisher.asyncio, "sleep", noted)
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(*(block(n) for n in range(9 * CHUNK_HASHES)))
    await settle(engine, index)
    assert pauses[:5] == [8, 4, 2, 1, 1]
    del pauses[:]
    engine.store(block(-1 % (1 << 64)))
    await settle(engine, index)
    assert set(pauses) <= {1}


async def test_queue_is_bounded_while_redis_is_away(monkeypatch):
    monkeypatch.setattr(index_publisher, "MAX_PENDING_HASHES", 10)
    monkeypatch.setattr(index_publisher, "CHUNK_HASHES", 5)
    index = IndexInMemory(["lost"])
    engine = Engine(index)
    for number in range(50):
        engine.store(block(number))
    await settle(engine, index)
    assert engine.feed.replays == 1


steps = st.lists(
    st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 9), st.booleans()), min_size=1, max_size=20
)
fates = st.lists(st.sampled_from(["fine", "lost", "unanswered", "wiped"]), max_size=10)


@given(steps=steps, fates=fates)
@settings(max_examples=150, deadline=None)
def test_index_and_cache_converge_despite_losses(steps, fates):
    async def scenario() -> None:
        index = IndexInMemory(fates)
        engine = Engine(index)
        for kind, number, delivered in steps:
            change = engine.store if kind == "store" else engine.remove
            change(block(number), delivered=delivered)
            await asyncio.sleep(0)
        # A last event that arrives reveals a gap before it; an engine that says nothing more has none to tell.
        engine.store(block(100))
        while index.answers:
            before = engine.feed.acknowledged
            await settle(engine, index)
            engine.feed.check(index.revision, before)
            engine.store(block(100 + len(index.answers)))
        await settle(engine, index)

    original = (index_publisher.PACE_S, index_publisher.RETRY_S)
    index_publisher.PACE_S = index_publisher.RETRY_S = 0
    try:
        asyncio.run(scenario())
    finally:
        index_publisher.PACE_S, index_publisher.RETRY_S = original


async def test_sampled_blocks_are_named_again_in_turn():
    index = IndexInMemory()
    engine = Engine(index)
    blocks = [block(number) for number in range(256 * 4)]
    engine.store(*blocks)
    engine.remove(*blocks[:8])
    await settle(engine, index)
    for _ in range(index_publisher.ROUND):
        engine.clock.advance(index_publisher.NAME_AGAIN_S)
        before = len(index.named_again)
        await run_until(engine, lambda before=before: len(index.named_again) > before)
    sampled = [each for each in blocks[8:] if each[-1] % sampling_of(16) == 0]
    assert len(sampled) == 127
    assert set(index.named_again) == set(sampled)
    assert max(index.calls[-index_publisher.ROUND :]) == 4


async def test_cleared_blocks_are_not_named_again():
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(8))
    engine.blocks = {}
    engine.publish(AllCleared())
    engine.clock.advance(index_publisher.NAME_AGAIN_S)
    await settle(engine, index)
    assert index.named_again == []


@pytest.mark.parametrize(("page_size", "every"), [(1, 128), (16, 8), (32, 4), (48, 2), (64, 2), (128, 1), (512, 1)])
def test_one_block_of_about_128_tokens_is_sampled(page_size, every):
    assert sampling_of(page_size) == every


async def test_error_while_reading_a_batch_leads_to_a_replay(monkeypatch):
    index = IndexInMemory()
    engine = Engine(index)
    engine.store(block(1))
    await settle(engine, index)

    def fail(self, event: KvEvent) -> None:
        raise ValueError("of the test")

    with monkeypatch.context() as patched:
        patched.setattr(IndexFeed, "_queue", fail)
        engine.store(block(2))
    await settle(engine, index)
    assert index.blocks == {block(1), block(2)}
    assert engine.feed.replays == 1
