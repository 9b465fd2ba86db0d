"""A modelled worker takes the time that its rates say, in the order of the engine."""

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Role
from tandem_lab.simulate.clock import EventQueue
from tandem_lab.simulate.jobs import Job
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.simulate.worker import ModelledWorker

BLOCK = 100
TIMES = ServiceTimes(
    prefill_rate=1000.0, chunk_tokens=200, decode_steps=((1, 0.01), (3, 0.03)), token_bytes=100.0, transfer_rate=1e6
)


class Bench:
    """One worker and the events of its jobs."""

    def __init__(self, *, capacity: int = 100, max_sequences: int = 8, role: Role = Role.BOTH) -> None:
        self.events = EventQueue()
        self.reported: list[tuple[str, float]] = []
        self.cache_changes = 0
        self.worker = ModelledWorker(
            name="w",
            role=role,
            times=TIMES,
            capacity=capacity,
            block_tokens=BLOCK,
            max_sequences=max_sequences,
            events=self.events,
            on_cache_change=self._cache_changed,
        )

    def _cache_changed(self) -> None:
        self.cache_changes += 1

    def job(self, name: str, *, prompt: int, output: int, chain: str = "", remote: bool = False) -> Job:
        return Job(
            chain=[letter.encode() for letter in chain],
            prompt_tokens=prompt,
            output_tokens=output,
            on_prompt=self._tell(f"{name} prompt"),
            on_end=self._tell(f"{name} end"),
            on_room=self._tell(f"{name} room") if remote else None,
        )

    def _tell(self, what: str):
        return lambda: self.reported.append((what, round(self.events.now(), 6)))

    def submit_at(self, time: float, job: Job) -> None:
        self.events.at(time, lambda: self.worker.submit(job))

    async def run(self) -> list[tuple[str, float]]:
        await self.events.run()
        return self.reported


async def test_prompt_takes_its_tokens_and_each_further_token_a_step():
    bench = Bench()
    bench.submit_at(0.0, bench.job("a", prompt=300, output=5, chain="abc"))
    assert await bench.run() == [("a prompt", 0.3), ("a end", 0.34)]
    assert bench.worker.done.gaps == {0.01: 4}
    assert bench.worker.done.output_tokens == 5


async def test_chunked_prompt_updates_index_twice():
    bench = Bench()
    bench.submit_at(0.0, bench.job("a", prompt=1000, output=1, chain="abcdefghij"))
    await bench.run()
    assert bench.cache_changes == 2, "when it gets pages, which may displace others, and when all of it is cached"


async def test_cached_prompt_computes_its_last_block():
    bench = Bench()
    bench.submit_at(0.0, bench.job("a", prompt=300, output=1, chain="abc"))
    bench.submit_at(1.0, bench.job("b", prompt=300, output=1, chain="abx"))
    bench.submit_at(2.0, bench.job("c", prompt=300, output=1, chain="abc"))
    times = dict(await bench.run())
    assert times["b prompt"] == pytest.approx(1.1)
    # A token at least is computed, and the cache has whole blocks.
    assert times["c prompt"] == pytest.approx(2.1)
    assert (bench.worker.done.hit_blocks, bench.worker.done.prompt_blocks) == (4, 9)
    assert bench.worker.done.computed_tokens == 500


async def test_queued_prompt_finds_blocks_computed_before_it():
    bench = Bench()
    for name in "ab":
        bench.submit_at(0.0, bench.job(name, prompt=250, output=1, chain="xy"))
    # The first step has two blocks of a; the second one its rest, and what b does not find of them.
    assert await bench.run() == [("a prompt", 0.3), ("b prompt", 0.3), ("a end", 0.3), ("b end", 0.3)]
    assert bench.worker.done.computed_tokens == 300


async def test_decodes_wait_for_a_chunk_of_a_prompt():
    bench = Bench()
    bench.submit_at(0.0, bench.job("a", prompt=100, output=4, chain="a"))
    bench.submit_at(0.105, bench.job("b", prompt=400, output=1, chain="bcde"))
    # The step that runs ends at 0.11; then two chunks of 200 tokens, each with a token for a.
    assert await bench.run() == [("a prompt", 0.1), ("b prompt", 0.53), ("b end", 0.53), ("a end", 0.53)]
    assert {round(gap, 6): count for gap, count in bench.worker.done.gaps.items()} == {0.01: 1, 0.21: 2}


async def test_modelled_step_time_grows_with_sequences():
    bench = Bench()
    bench.submit_at(0.0, bench.job("a", prompt=100, output=11, chain="a"))
    bench.submit_at(0.105, bench.job("b", prompt=100, output=3, chain="b"))
    # a: a step to 0.11, a mixed one to 0.22, two of 20 ms with b to 0.26, and the six that are left alone.
    times = dict(await bench.run())
    assert times["b prompt"] == pytest.approx(0.22)
    assert times["b end"] == pytest.approx(0.26)
    assert times["a end"] == pytest.approx(0.26 + 6 * 0.01)


async def test_request_waits_until_its_pages_and_its_row_are_free():
    by_pages = Bench(capacity=3)
    by_rows = Bench(max_sequences=1)
    for bench in (by_pages, by_rows):
        bench.submit_at(0.0, bench.job("a", prompt=100, output=100, chain="a"))
        bench.submit_at(0.0, bench.job("b", prompt=100, output=100, chain="b"))
        times = dict(await bench.run())
        assert times["b prompt"] == pytest.approx(times["a end"] + 0.1)


async def test_newest_sequence_is_retracted_when_pool_is_full():
    bench = Bench(capacity=7)
    for name in "ab":
        bench.submit_at(0.0, bench.job(name, prompt=100, output=390, chain=name))
    times = dict(await bench.run())
    # b is admitted while a is expected to need 4 blocks and b 3; each needs 5, and b is retracted.
    assert bench.worker.done.retractions == 1
    assert times["a end"] < times["b end"]
    assert bench.worker.done.output_tokens == 2 * 390
    assert max(bench.worker.done.gaps) > 0.1, "what it waited is a gap between two of its tokens"
    assert bench.worker.cache.room == bench.worker.cache.capacity


async def test_remote_prompt_reserves_pages_and_decodes_on_kv_arrival():
    bench = Bench(role=Role.DECODE)
    remote = bench.job("r", prompt=200, output=3, chain="rs", remote=True)
    bench.submit_at(0.0, bench.job("l", prompt=400, output=2, chain="abcd"))
    bench.submit_at(0.1, remote)
    bench.events.at(0.25, lambda: bench.worker.begin_decode(remote))
    times = dict(await bench.run())
    # Admitted between two chunks; the first token comes with the KV, the next after the chunk that runs then.
    assert times["r prompt"] == pytest.approx(0.25)
    assert times["l prompt"] == pytest.approx(0.4)
    assert bench.worker.cache.match([b"r", b"s"]) == 2


async def test_prefill_worker_keeps_its_pages_until_they_have_moved():
    bench = Bench(capacity=2, role=Role.PREFILL)
    first = bench.job("a", prompt=200, output=0, chain="ab")
    bench.submit_at(0.0, first)
    bench.submit_at(0.0, bench.job("b", prompt=200, output=0, chain="cd"))
    bench.events.at(1.0, lambda: bench.worker.release(first))
    assert await bench.run() == [("a prompt", 0.2), ("b prompt", 1.2)]


async def test_report_counts_queue_and_sequences_as_a_worker_does():
    bench = Bench()
    for name, at in (("a", 0.0), ("b", 0.0), ("c", 0.0)):
        bench.submit_at(at, bench.job(name, prompt=300, output=10, chain=name * 3))
    seen = []
    bench.events.at(0.25, lambda: seen.append(bench.worker.load()))
    await bench.run()
    assert seen[0].sequences == 3
    assert seen[0].queue_tokens == 100 + 300 + 300
    assert bench.worker.outstanding == 0
    assert bench.worker.load().room_tokens == 100 * BLOCK


def test_step_times_are_linear_between_and_beyond_points():
    assert [round(TIMES.decode_step_s(n), 6) for n in (0, 1, 2, 3, 5)] == [0.0, 0.01, 0.02, 0.03, 0.05]
    assert ServiceTimes(decode_steps=((4, 0.02),)).decode_step_s(100) == 0.02


def test_exposed_transfer_excludes_overlap_with_prompt():
    per_token = 100.0 / 1e6
    assert TIMES.exposed_transfer_s(1000, 1.0) == pytest.approx(0.002 + 200 * per_token)
    assert TIMES.exposed_transfer_s(1000, 0.05) == pytest.approx(0.002 + 1000 * per_token - 0.05)


@pytest.mark.parametrize("steps", [(), ((0, 0.1),), ((4, 0.1), (4, 0.2)), ((4, 0.1), (2, 0.2))])
def test_step_times_that_do_not_ascend_are_refused(steps):
    with pytest.raises(ConfigError, match="--decode-step-ms"):
        ServiceTimes(decode_steps=steps)
