"""Workers that are killed in the middle of something (0 to 6, 9, 32)."""

from collections.abc import Callable
from itertools import count

from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind, Load
from tandem_testing.waiting import until

WELL = frozenset({"finished", "moved"})
"""Outcomes of attempts that nothing happened to."""
LONG_PROMPT = 700
"""Words: several chunks, so that prefill takes a while."""


async def kill_busiest_decode(run: Run, wanted: list[Ask], kill: Callable[[Worker], None] = Worker.kill) -> Worker:
    """Load, and the death of the decode worker that has most of it."""
    lost = await run.lost_attempts()
    victims: list[Worker] = []
    died = 0.0

    async def fault(load: Load) -> None:
        nonlocal died
        victims.append(await run.busiest_decode(load))
        kill(victims[0])
        died = run.now()

    answers = await run.under_fault(wanted, fault, speaking=max(2, len(wanted) // 3))
    await run.sample("kill -9 decode", answers, after=died, of=lambda outcomes: bool(outcomes - WELL))
    run.expect(await run.lost_attempts() > lost, "no stream was on the worker that died")
    return victims[0]


async def serves_again(run: Run, victim: Worker) -> None:
    """A worker of that name is back and gets requests."""
    await run.fleet.all_ready(READY_TIMEOUT_S)
    # Prompts that no worker has cached: where one was computed is where it is computed again.
    unseen = count(600, 8)

    async def used() -> bool:
        answers = await run.works(8, first=next(unseen))
        attempts = [attempt for answer in answers for attempt in await run.attempts(answer)]
        return any(str(attempt["decode"]).startswith(f"{victim.id}@") for attempt in attempts)

    await until(used, READY_TIMEOUT_S, f"{victim.id} is used again")


@scenario(0, quick=True)
async def nothing_happens(run: Run) -> None:
    async def fault(load: Load) -> None:
        return

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)


@scenario(1, quick=True)
async def a_decode_worker_dies(run: Run) -> None:
    victim = await kill_busiest_decode(run, run.asks(Kind.GREEDY, Kind.PLAIN))
    await serves_again(run, victim)


@scenario(2, quick=True)
async def a_decode_worker_dies_under_seeded_sampling(run: Run) -> None:
    """Its service alone is killed: the engine must not outlive it."""
    await kill_busiest_decode(run, run.asks(Kind.SEEDED, Kind.PENALIZED), Worker.kill_service)


@scenario(3)
async def a_decode_worker_dies_under_grammars(run: Run) -> None:
    await kill_busiest_decode(run, run.asks(Kind.SCHEMA, Kind.REGEX, Kind.TOOL))


@scenario(4)
async def a_decode_worker_dies_under_choices_with_logprobs(run: Run) -> None:
    await kill_busiest_decode(run, run.asks(Kind.CHOICES, count=max(2, run.scale.streams // 4)))


@scenario(5)
async def a_decode_worker_dies_between_the_transfer_and_its_first_token(run: Run) -> None:
    victim = run.fleet.of_role("decode")[0]
    before = victim.knobs.committed("digest")
    victim.knobs.turn(die_at="digest")
    async with run.load() as load:
        wanted = run.asks(Kind.GREEDY, Kind.CHOICES, count=max(8, run.scale.streams // 2))
        died_of_it = lambda: victim.knobs.committed("digest") > before  # noqa: E731
        await run.until_it_happens(load, wanted, died_of_it, "a transfer to the victim is complete")
        died = run.now()
        victim.knobs.turn()
        await run.judge(await load.gathered(), after=died)


@scenario(6, quick=True)
async def a_prefill_worker_dies_while_it_computes(run: Run) -> None:
    lost = await run.lost_attempts()
    async with run.load() as load:
        # Long enough that a worker is computing at the time of the check, which takes some hundredths of a second.
        load.send(run.asks(Kind.PLAIN, tokens=24, prompt_words=2 * LONG_PROMPT, count=max(6, run.scale.streams // 3)))
        victim = await computing(run)
        victim.kill()
        died = run.now()
        await run.judge(await load.gathered(), after=died)
    run.expect(await run.lost_attempts() > lost, "no request was on the worker that died")


async def computing(run: Run) -> Worker:
    """A prefill worker that is in the middle of a prompt."""
    found: list[Worker] = []

    async def busy() -> bool:
        for worker in run.fleet.of_role("prefill"):
            report = await run.fleet.audit(worker)
            if report is not None and report["private_pages"] > 0:
                found.append(worker)
        return bool(found)

    await until(busy, PATIENCE_S, "a prefill worker computes")
    return found[0]


@scenario(9, quick=True)
async def a_prefill_worker_is_restarted_at_the_same_address(run: Run) -> None:
    """All of them, so that the next request has to use one that was."""
    victims = run.fleet.of_role("prefill")
    await transferred(run, first=0)
    for victim in victims:
        victim.kill()
    await until(lambda: not any(victim.part.alive for victim in victims), PATIENCE_S, "they are dead")
    await run.fleet.all_ready(READY_TIMEOUT_S)
    await transferred(run, first=100)


async def transferred(run: Run, *, first: int) -> None:
    """A few requests whose KV moves from prefill to decode."""
    before = await run.fleet.worker_metric("kv_transfers_total", "decode")
    async with run.load() as load:
        asked = run.now()
        load.send(run.asks(count=4, tokens=8, prompt_words=200, first=first))
        await run.judge(await load.gathered(), after=asked)

    async def counted() -> bool:
        return await run.fleet.worker_metric("kv_transfers_total", "decode") > before

    await until(counted, PATIENCE_S, "a transfer is counted")


@scenario(32)
async def an_engine_dies_and_its_service_lives(run: Run) -> None:
    victim = await kill_busiest_decode(run, run.asks(Kind.GREEDY, Kind.PLAIN), Worker.kill_engine)
    run.expect("engine process exited with status -9" in victim.part.log_text(), "its service did not notice")
