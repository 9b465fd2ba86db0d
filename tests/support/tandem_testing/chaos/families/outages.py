"""A role without workers, and memory without room (12, 13, 34)."""

import asyncio

from tandem_testing.chaos.fleet import Shape
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

LEASES_END_S = 5.0
PAGES = 100
SMALL = Shape(engine_flags=("--num-pages", str(PAGES)))
FULL = 0.9
"""Share of a worker's pages in use from which on requests wait for each other."""
LOOK_S = 0.2


@scenario(12)
async def all_prefill_workers_die(run: Run) -> None:
    async def fault(load: Load) -> None:
        for worker in run.fleet.of_role("prefill"):
            worker.kill()

    with run.fleet.no_restarts():
        await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN, prompt_words=200), fault)
        async with run.load() as load:
            asked = run.now()
            load.send(run.asks(Kind.PLAIN, count=4, tokens=16, prompt_words=200, first=200))
            await run.judge(await load.gathered(), after=asked)


@scenario(13)
async def all_decode_workers_die(run: Run) -> None:
    """Held down, what has begun waits and new requests are refused; brought back, every stream continues."""
    async with run.load() as load:
        load.send(run.asks(Kind.GREEDY, Kind.PLAIN))
        await until(lambda: load.speaking >= 2, PATIENCE_S, "streams speak")
        with run.fleet.no_restarts():
            for worker in run.fleet.of_role("decode"):
                worker.kill()
            # Until their leases are over a request may get its first token from a prefill worker, and then waits too.
            await asyncio.sleep(LEASES_END_S)
            async with run.load() as latecomers:
                latecomers.send(run.asks(Kind.PLAIN, count=2, first=300))
                late = await latecomers.gathered()
        answers = await load.gathered()
    for answer in late:
        run.expect(answer.status == 503, f"a new request got {answer.status} instead of 503: {answer.error}")
    await run.judge(answers)
    await run.fleet.all_ready(READY_TIMEOUT_S)
    await run.works(8)


@scenario(34, shape=SMALL)
async def kv_pages_are_exhausted(run: Run) -> None:
    """Together the streams need several times the pages of a decode worker."""
    page = 16
    load = run.asks(Kind.GREEDY, Kind.PLAIN, Kind.SEEDED, count=max(60, 2 * run.scale.streams))
    needed = sum(len(ask.prompt.split()) + ask.max_tokens for ask in load) // page
    before = await run.fleet.worker_metric("num_preemptions_total")
    fullest = 0.0
    async with run.load() as clients:
        clients.send(load)
        while not clients.finished:
            usages = [
                await run.fleet.metric(worker.url, "tandem_worker_kv_cache_usage_perc")
                for worker in run.fleet.of_role("decode")
            ]
            fullest = max(fullest, *usages)
            await asyncio.sleep(LOOK_S)
        await run.judge(await clients.gathered())
    retracted = await run.fleet.worker_metric("num_preemptions_total") - before
    run.expect(retracted > 0 or fullest >= FULL, f"memory never was short: {fullest:.0%} used")
    run.notes.append(
        f"about {needed} pages needed, {2 * (PAGES - 1)} there; {fullest:.0%} used, {retracted:g} retractions"
    )
