"""Outputs of running requests leave time of the event loop to the starts of others."""

import asyncio
from collections import Counter

import pytest

from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.dispatch import reading_pace
from tandem_services.gateway.dispatch.engine_client import LivenessTiming, Revival
from tandem_services.gateway.dispatch.engine_pool import EnginePool
from tandem_services.gateway.dispatch.reading_pace import CROWD, MAX_PAUSE_S, OTHERS, ReadingPace
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.service_clock import ServiceClock

PATIENCE_S = 60.0


async def rested_s(pace: ReadingPace, took_s: float) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await pace.rest(took_s)
    return clock() - began


async def test_crowd_gets_a_multiple_of_the_outputs_time():
    pace = ReadingPace(lambda: CROWD + 1)
    assert await rested_s(pace, 0.02) >= OTHERS * 0.02 - 0.002  # a tick of the loop's timers


async def test_readers_of_several_workers_share_one_pace():
    pace = ReadingPace(lambda: CROWD + 1)
    first, second = await asyncio.gather(rested_s(pace, 0.02), rested_s(pace, 0.02))
    assert max(first, second) >= 2 * OTHERS * 0.02 - 0.002


async def test_long_outputs_wait_for_a_bounded_time():
    pace = ReadingPace(lambda: CROWD + 1)
    clock = asyncio.get_running_loop().time
    await asyncio.gather(*(pace.rest(60.0) for _ in range(4)))
    assert pace._due - clock() <= MAX_PAUSE_S


async def test_pause_of_a_reader_ends_when_fewer_streams_wait(monkeypatch):
    monkeypatch.setattr(reading_pace, "MAX_PAUSE_S", 10 * PATIENCE_S)
    waiting = CROWD + 1
    pace = ReadingPace(lambda: waiting)
    resting = asyncio.create_task(pace.rest(10 * PATIENCE_S))
    await asyncio.sleep(0.01)
    assert not resting.done()
    waiting = CROWD
    async with asyncio.timeout(PATIENCE_S):
        await resting


async def test_readers_of_many_workers_have_their_turns():
    pace = ReadingPace(lambda: CROWD + 1)
    turns = Counter(dict.fromkeys(range(8), 0))

    async def read(reader: int) -> None:
        for _ in range(6):
            await pace.rest(0.002)
            turns[reader] += 1
            assert max(turns.values()) - min(turns.values()) <= 1

    await asyncio.gather(*map(read, turns))


async def test_without_a_crowd_nothing_rests():
    pace = ReadingPace(lambda: CROWD)
    resting = pace.rest(60.0)
    with pytest.raises(StopIteration):
        resting.send(None)


class Kept:
    """A listener that keeps the tokens of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.is_lost = False

    def on_taken(self) -> None:
        pass

    def on_output(self, output: TokenOutput) -> "Kept":
        self.tokens += output.token_ids
        self.began.set()
        if output.finish is not None:
            self.ended.set()
        return self

    def on_lost(self) -> None:
        self.is_lost = True
        self.ended.set()

    def pour(self, at: float) -> None:
        pass


SCRIPT = range(5, 205)
REQUEST = GenerateRequest(rid="a", input_ids=(3, 4), sampling=SamplingParams(max_tokens=len(SCRIPT), ignore_eos=True))


def pool_of(rack, pace: ReadingPace, timing: LivenessTiming) -> EnginePool:
    clock = ServiceClock()
    return EnginePool(
        context=rack.context,
        timing=timing,
        on_dead=lambda _: None,
        revival=Revival(context=rack.context, clock=clock, on_alive=lambda _: None),
        clock=clock,
        pace=pace,
    )


@pytest.mark.parametrize("starting", [0, CROWD + 1])
async def test_all_outputs_of_a_worker_arrive_once(rack, starting):
    engine = rack.add("w", MockBehavior(token=scripted_tokens(SCRIPT), step_s=0.001))
    kept, pool = Kept(), pool_of(rack, ReadingPace(lambda: starting), LivenessTiming())
    try:
        assert pool.connect(engine.view).submit(REQUEST, kept)
        async with asyncio.timeout(PATIENCE_S):
            await kept.ended.wait()
    finally:
        pool.close()
    assert not kept.is_lost
    assert kept.tokens == [*SCRIPT]


async def test_worker_that_is_not_read_for_long_is_not_dead(rack, monkeypatch):
    monkeypatch.setattr(reading_pace, "MAX_PAUSE_S", PATIENCE_S)
    monkeypatch.setattr(reading_pace, "OTHERS", 1e6)
    starting, timing = CROWD + 1, LivenessTiming(ping_interval_s=0.05, unanswered_pings=30)
    engine = rack.add("w", MockBehavior(token=scripted_tokens(SCRIPT), step_s=0.001))
    kept, pool = Kept(), pool_of(rack, ReadingPace(lambda: starting), timing)
    try:
        assert pool.connect(engine.view).submit(REQUEST, kept)
        async with asyncio.timeout(PATIENCE_S):
            await kept.began.wait()
            await asyncio.sleep(2 * timing.ping_interval_s * timing.unanswered_pings)
            starting = 0
            await kept.ended.wait()
    finally:
        pool.close()
    assert not kept.is_lost
    assert kept.tokens == [*SCRIPT]
