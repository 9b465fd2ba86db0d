"""Processes that live and do nothing (10, 11, 33)."""

import asyncio

from tandem_testing.chaos.families.crashes import computing
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

FROZEN_S = 30.0
FENCED_S = 20.0
"""After this it is fenced everywhere."""
BLOCKED_S = 5.0


@scenario(10)
async def a_decode_worker_is_frozen_and_comes_back(run: Run) -> None:
    """Frozen for longer than a lease lasts: it has to come back as another incarnation."""
    frozen_at, fleet = run.now(), run.fleet
    lost = await run.lost_attempts()
    victims: list[Worker] = []

    async def fault(load: Load) -> None:
        nonlocal frozen_at
        victims.append(await run.busiest_decode(load))
        victims[0].freeze()
        frozen_at = run.now()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
    run.expect(await run.lost_attempts() > lost, "no stream was on the worker that froze")
    await asyncio.sleep(max(0.0, frozen_at + FROZEN_S - run.now()))
    (victim,) = victims
    starts = victim.part.starts
    victim.thaw()
    await until(lambda: victim.part.starts > starts, READY_TIMEOUT_S, "the zombie ends")
    run.expect("is fenced" in victim.part.log_text(), "the zombie did not learn that it was fenced")
    await fleet.all_ready(READY_TIMEOUT_S)
    await run.works()


@scenario(11)
async def a_prefill_worker_is_frozen_during_a_transfer(run: Run) -> None:
    """Until it is fenced. Pages that it was granted belong to no request until it has ended: it may continue
    writing."""
    lost = await run.lost_attempts()
    async with run.load() as load:
        load.send(run.asks(Kind.PLAIN, tokens=24, prompt_words=700, count=max(4, run.scale.streams // 3)))
        victim = await computing(run)
        victim.freeze()
        since = run.now()
        await run.judge(await load.gathered(), after=since)
    run.expect(await run.lost_attempts() > lost, "no request was on the worker that froze")
    await asyncio.sleep(max(0.0, since + FENCED_S - run.now()))
    kept = await run.fleet.worker_metric("kv_pages_quarantined", "decode")
    run.expect(kept > 0, "pages that the frozen worker was granted are used again")
    run.notes.append(f"{kept:g} pages waited for the frozen worker {FENCED_S:g} s after it froze")
    starts = victim.part.starts
    victim.thaw()
    await until(lambda: victim.part.starts > starts, READY_TIMEOUT_S, "the zombie ends")
    await run.fleet.all_ready(READY_TIMEOUT_S)
    await run.works()


@scenario(33)
async def the_loop_of_an_engine_is_blocked(run: Run) -> None:
    async def fault(load: Load) -> None:
        victim = await run.busiest_decode(load)
        before = victim.knobs.committed("block_s")
        victim.knobs.turn(block_s=BLOCKED_S)
        await until(lambda: victim.knobs.committed("block_s") > before, PATIENCE_S, "the loop is blocked")

    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
