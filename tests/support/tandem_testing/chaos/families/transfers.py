"""KV on its way from prefill to decode (7, 8, 24 to 26)."""

from collections.abc import Sequence

from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind
from tandem_testing.waiting import until


def prompts(run: Run) -> list[Ask]:
    """Prompts of several pages and chunks, so that there is something to transfer."""
    count = max(8, run.scale.streams // 2)
    return run.asks(Kind.GREEDY, Kind.PLAIN, tokens=32, prompt_words=400, count=count)


async def with_knobs(run: Run, workers: Sequence[Worker], fault: str, **knobs: int | float | str) -> None:
    """Load while `workers` have these knobs; the first `fault` committed is the moment that silences count from."""
    before = sum(worker.knobs.committed(fault) for worker in workers)

    def happened() -> bool:
        return sum(worker.knobs.committed(fault) for worker in workers) > before

    for worker in workers:
        worker.knobs.turn(**knobs)
    async with run.load() as load:
        await run.until_it_happens(load, prompts(run), happened, fault)
        since = run.now()
        if "die_at" in knobs:
            # One death is the scenario; the worker that takes its place shall live.
            for worker in workers:
                worker.knobs.turn()
        await run.judge(await load.gathered(), after=since)
    for worker in workers:
        worker.knobs.turn()


@scenario(7)
async def a_prefill_worker_dies_during_a_transfer(run: Run) -> None:
    starts = {worker.id: worker.part.starts for worker in run.fleet.of_role("decode")}
    await with_knobs(run, run.fleet.of_role("prefill")[:1], "push", die_at="push")
    for worker in run.fleet.of_role("decode"):
        run.expect(worker.part.starts == starts[worker.id], f"{worker.id} died with its peer")


@scenario(8)
async def a_prefill_worker_dies_before_a_transfer(run: Run) -> None:
    await with_knobs(run, run.fleet.of_role("prefill")[:1], "before-push", die_at="before-push")


@scenario(24)
async def transferred_pages_are_corrupt(run: Run) -> None:
    before = await run.fleet.worker_metric("kv_digest_mismatches_total", "decode")
    await with_knobs(run, run.fleet.of_role("decode"), "corrupt", corrupt=3)
    seen = 0.0

    async def counted() -> bool:
        nonlocal seen
        seen = await run.fleet.worker_metric("kv_digest_mismatches_total", "decode") - before
        return seen > 0

    await until(counted, PATIENCE_S, "a digest mismatch is counted")
    committed = sum(worker.knobs.committed("corrupt") for worker in run.fleet.of_role("decode"))
    run.notes.append(f"{committed} transfers corrupted in all, {seen:g} mismatches counted in this run")


@scenario(25)
async def a_push_comes_after_its_grant(run: Run) -> None:
    """Held back longer than a grant is valid and a hold lasts."""
    await with_knobs(run, run.fleet.of_role("prefill"), "hold_push", hold_push_s=12.0)
    await run.works()


@scenario(26)
async def records_are_lost_doubled_and_reordered(run: Run) -> None:
    receivers = run.fleet.of_role("decode")
    await with_knobs(run, receivers, "repeat_records", repeat_records=20, reverse_messages=20)
    run.salt += "-lost"
    await with_knobs(run, receivers, "lose_records", lose_records=2)
