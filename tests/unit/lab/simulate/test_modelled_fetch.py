"""A fetch takes messages, turns of the holder's loop and bytes over the link; what does not come is computed."""

import pytest

from tandem_engine.config import Role
from tandem_lab.simulate.clock import EventQueue
from tandem_lab.simulate.jobs import Job
from tandem_lab.simulate.prefix_fetch import ServiceTimes, WantedPrefix
from tandem_lab.simulate.worker import ModelledWorker

BLOCK = 100
TIMES = ServiceTimes(
    prefill_rate=1000.0,
    chunk_tokens=200,
    decode_steps=((1, 0.01),),
    token_bytes=100.0,
    transfer_rate=1e6,
    fetch_s=0.004,
)
"""A block takes 0.1 s to compute and 0.01 s to move."""


class Two:
    """Worker `holder` has computed "abc" by 0.3 s, and `requester` has nothing."""

    def __init__(self, *, asker_blocks: int = 100, holder_blocks: int = 100, had: str = "abc") -> None:
        self.events = EventQueue()
        self.prompts: dict[str, float] = {}
        """When each was computed."""
        self.requester = self._worker("requester", asker_blocks)
        self.holder = self._worker("holder", holder_blocks)
        if had:
            self.at(0.0, self.holder, "had", tokens=len(had) * BLOCK, chain=had, output=1)

    def _worker(self, name: str, blocks: int) -> ModelledWorker:
        return ModelledWorker(
            name=name,
            role=Role.BOTH,
            times=TIMES,
            capacity=blocks,
            block_tokens=BLOCK,
            max_sequences=8,
            events=self.events,
            on_cache_change=lambda: None,
        )

    def at(
        self,
        time: float,
        worker: ModelledWorker,
        name: str,
        *,
        tokens: int,
        chain: str,
        output: int = 2,
        wanted: int = 0,
        within_s: float = 1.0,
    ) -> None:
        """Submit a prompt, of which `wanted` blocks are to come from the holder."""
        job = Job(
            chain=[letter.encode() for letter in chain],
            prompt_tokens=tokens,
            output_tokens=output,
            on_prompt=lambda: self.prompts.update({name: self.events.now()}),
            on_end=lambda: None,
            wanted=WantedPrefix(holder=self.holder, blocks=wanted, within_s=within_s) if wanted else None,
        )
        self.events.at(time, lambda: worker.submit(job))

    def ask(self, time: float = 1.0, name: str = "asked", *, wanted: int = 3, within_s: float = 1.0) -> None:
        """350 tokens, of which the three blocks are wanted."""
        self.at(time, self.requester, name, tokens=350, chain="abc", wanted=wanted, within_s=within_s)

    async def run(self) -> dict[str, float]:
        await self.events.run()
        for worker in (self.requester, self.holder):
            assert worker.outstanding == 0
            assert worker.cache.room == worker.cache.capacity
        return self.prompts


async def test_fetch_from_idle_worker_takes_messages_and_bytes():
    two = Two()
    two.ask()
    assert (await two.run())["asked"] == pytest.approx(1.0 + 0.004 + 3 * 0.01 + 0.05)
    assert two.requester.done.computed_tokens == 50
    assert (two.requester.done.hit_blocks, two.requester.fetches.blocks) == (3, 3)
    assert two.requester.cache.match([b"a", b"b", b"c"]) == two.holder.cache.match([b"a", b"b", b"c"]) == 3


async def test_busy_source_handles_fetch_messages_between_steps():
    two = Two()
    two.at(1.0, two.holder, "other", tokens=400, chain="wxyz")
    two.ask(1.01)
    # Chunks end at 1.2 and 1.4; the blocks have left by 1.23.
    assert (await two.run())["asked"] == pytest.approx(1.4 + 0.002 + 0.05)


async def test_fetch_after_partial_eviction_is_shorter():
    two = Two(holder_blocks=4)
    two.at(1.001, two.holder, "other", tokens=150, chain="x")
    two.ask()
    # Its two blocks took the place of "c"; their chunk ends at 1.151, and so the answer finds "ab".
    assert (await two.run())["asked"] == pytest.approx(1.151 + 0.02 + 0.002 + 0.15)
    assert two.requester.fetches.blocks == 2


async def test_fetch_of_evicted_prefix_returns_only_the_reply():
    two = Two(had="")
    two.ask()
    assert (await two.run())["asked"] == pytest.approx(1.004 + 0.35)
    assert two.requester.fetches.blocks == 0


async def test_fetch_moves_only_missing_blocks():
    two = Two()
    two.at(0.5, two.requester, "first", tokens=100, chain="a", output=1)
    two.ask()
    assert (await two.run())["asked"] == pytest.approx(1.004 + 2 * 0.01 + 0.05)
    assert two.requester.fetches.blocks == 2


async def test_cached_prefix_is_not_fetched():
    two = Two()
    two.at(0.5, two.requester, "first", tokens=300, chain="abc", output=1)
    two.ask()
    assert (await two.run())["asked"] == pytest.approx(1.05)


async def test_waiting_ends_and_the_prompt_is_computed():
    two = Two()
    two.ask(within_s=0.01)
    assert (await two.run())["asked"] == pytest.approx(1.01 + 0.35)
    assert two.requester.fetches.blocks == 0


async def test_one_fetch_serves_all_requests_of_the_prefix():
    two = Two()
    two.ask(1.0, "first")
    two.ask(1.01, "second")
    prompts = await two.run()
    assert prompts["first"] == pytest.approx(1.084)
    # A step of the first one goes beside the second one's chunk.
    assert prompts["second"] == pytest.approx(1.084 + 0.05 + 0.01)
    assert two.requester.fetches.blocks == 3


async def test_queue_continues_and_keeps_slot_of_fetching_request():
    two = Two()
    two.at(0.9, two.requester, "before", tokens=400, chain="defg", output=1)
    two.ask()
    two.at(1.02, two.requester, "after", tokens=100, chain="h", output=1)
    seen = []
    two.events.at(1.03, lambda: seen.append(two.requester.load()))
    prompts = await two.run()
    assert seen[0].queue_tokens == 400 + 350 + 100
    assert seen[0].sequences == 3
    assert prompts["before"] == pytest.approx(1.3)
    # Both fit into one step, in this order.
    assert prompts["asked"] == prompts["after"] == pytest.approx(1.45)
    assert list(prompts).index("asked") < list(prompts).index("after")


async def test_fetch_is_bounded_by_free_pages():
    two = Two(asker_blocks=5)
    two.at(0.5, two.requester, "running", tokens=200, chain="de", output=100)
    two.ask()
    prompts = await two.run()
    assert two.requester.fetches.blocks == 2
    # It runs on for 99 steps after its prompt, in three blocks, and then there is room for the other one.
    assert prompts["asked"] == pytest.approx(0.7 + 0.99 + 0.15)
