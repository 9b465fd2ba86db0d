"""Long decodes while long prompts arrive: what one worker does to its streams, and what dividing it into two saves.

The same work for both: four streams of many tokens, and prompts of 2,048 tokens at fixed times, as far apart as three
single ones take on the mixed worker. Throughput is all of its tokens over the time until the last has come; latency
between tokens is that of the four streams, from the first prompt on.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from peers.engines.base import ServerEngine
from peers.jobs import Job, mixed
from peers.machine import Watch, wait_until_idle
from peers.percentiles import percentile
from peers.streams import Stream, all_within, complete, complete_all

STREAMS = 4
LONG_STREAM_TOKENS = 1024
PROMPT_TOKENS = 2048
LONG_PROMPTS = 6
GAP_IN_PROMPTS = 3.0


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """One server in one round."""

    engine: str
    model: str
    dtype: str
    round: int
    gap_s: float
    """Between prompts."""
    seconds: float
    """For all of the work."""
    tokens_per_s: float
    itl_ms: dict[str, float]
    """p50, p99, max of the long streams."""
    ttft_ms: dict[str, float]
    """p50, max of the long prompts."""
    others: float
    stage: str = ""


def gap_s(mixed_worker: ServerEngine) -> float:
    """Between prompts: as far apart as so many single ones take on one worker that does both."""
    return GAP_IN_PROMPTS * single_prompt_s(mixed_worker)


def single_prompt_s(engine: ServerEngine) -> float:
    """Seconds of one long prompt on an idle server; the second of two, so that nothing is done for the first time."""
    engine.resume()
    for number in (1, 2):
        seconds, _ = complete_all(engine.port, engine.model, _prompts(1, -number), limit_s=engine.deadline.wait_s())
    engine.pause()
    return seconds


def _prompts(count: int, number: int) -> list[Job]:
    return mixed("arriving", number, count=count, prompt=(PROMPT_TOKENS, PROMPT_TOKENS), output=(4, 4))


def play(engine: ServerEngine, number: int, *, model: str, dtype: str, gap_s: float) -> Interference:
    """One round. Raises `PeerError`."""
    output = (LONG_STREAM_TOKENS, LONG_STREAM_TOKENS)
    long = mixed("long streams", number, count=STREAMS, prompt=(64, 64), output=output)
    arriving = _prompts(LONG_PROMPTS, number)
    wait_until_idle()
    engine.resume()
    with Watch(engine.pids) as watch:
        streams, answers = asyncio.run(_together(engine, long, arriving, gap_s))
    engine.pause()
    since = min(answer.sent for answer in answers)
    gaps = [gap for stream in streams for gap in gaps_since(stream, since)]
    first = [answer.ttft * 1e3 for answer in answers]
    everything = [*streams, *answers]
    seconds = max(each.ended for each in everything) - min(each.sent for each in everything)
    tokens = sum(len(job.prompt) + job.output_len for job in [*long, *arriving])
    return Interference(
        engine=engine.name,
        model=model,
        dtype=dtype,
        round=number,
        gap_s=gap_s,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        itl_ms={"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "max": max(gaps)},
        ttft_ms={"p50": percentile(first, 0.5), "max": max(first)},
        others=watch.others,
    )


def gaps_since(stream: Stream, since: float) -> list[float]:
    """Milliseconds between its tokens that came after `since`."""
    return [gap * 1e3 for at, gap in zip(stream.times[1:], stream.gaps, strict=True) if at > since]


async def _together(
    engine: ServerEngine, long: Sequence[Job], arriving: Sequence[Job], gap_s: float
) -> tuple[list[Stream], list[Stream]]:
    began = time.perf_counter()

    async def arrive(job: Job, at: float) -> Stream:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await complete(engine.port, engine.model, job)

    streams = [complete(engine.port, engine.model, job) for job in long]
    # The streams decode before the first prompt comes.
    answers = [arrive(job, gap_s * (0.5 + place)) for place, job in enumerate(arriving)]
    both = await all_within(engine.deadline.wait_s(), [*streams, *answers])
    return both[: len(streams)], both[len(streams) :]
