"""Steps of an engine that fail (30, 31, 35)."""

from dataclasses import replace

from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind, Load
from tandem_testing.waiting import until

POISON = "Ж"
"""No prompt and no answer of the bundled model has it."""
MAX_DEATHS = 2


async def token_of(run: Run, text: str) -> int:
    """The last token of `text`."""
    gateway = run.fleet.gateways[0]
    answer = await run.fleet.http.post(f"{gateway.url}/tokenize", json={"model": run.fleet.model, "prompt": text})
    return int(answer.json()["tokens"][-1])


def poisoned(run: Run) -> Ask:
    (ask,) = run.asks(Kind.PLAIN, count=1, tokens=32, first=650)
    return replace(ask, prompt=f"{ask.prompt} {POISON}")


@scenario(30)
async def a_step_raises_for_one_request(run: Run) -> None:
    token = await token_of(run, POISON)
    starts = [part.starts for part in run.fleet.parts()]
    for worker in run.fleet.workers:
        worker.knobs.turn(poison=token, poison_effect="raise")
    bad = poisoned(run)

    async def fault(load: Load) -> None:
        load.send([bad])

    async with run.load() as load:
        load.send(run.asks(Kind.GREEDY, Kind.SEEDED))
        await until(lambda: load.speaking >= 2, PATIENCE_S, "streams speak")
        await fault(load)
        answers = await load.gathered()
    await run.judge([answer for answer in answers if answer.ask != bad])
    (refused,) = [answer for answer in answers if answer.ask == bad]
    run.requests += 1
    run.expect(refused.status == 500, f"the request at fault got {refused.status}: {refused.error}")
    run.expect([part.starts for part in run.fleet.parts()] == starts, "a process died of one request")


@scenario(31)
async def the_device_of_an_engine_is_lost(run: Run) -> None:
    victims: list[Worker] = []

    async def fault(load: Load) -> None:
        victim = await run.busiest_decode(load)
        victims.append(victim)
        before = victim.knobs.committed("lose_device")
        victim.knobs.turn(lose_device=1)
        await until(lambda: victim.knobs.committed("lose_device") > before, PATIENCE_S, "the device is lost")
        victim.knobs.turn()

    starts = {worker.id: worker.part.starts for worker in run.fleet.workers}
    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
    (victim,) = victims
    await until(lambda: victim.part.starts > starts[victim.id], READY_TIMEOUT_S, "the worker was started again")
    run.expect(victim.part.last_status not in (None, 0), f"it exited with {victim.part.last_status}")


@scenario(35)
async def a_request_kills_its_workers(run: Run) -> None:
    token = await token_of(run, POISON)
    before = sum(worker.knobs.committed("poison") for worker in run.fleet.workers)
    for worker in run.fleet.workers:
        worker.knobs.turn(poison=token, poison_effect="die")
    bad = poisoned(run)
    async with run.load() as load:
        load.send([bad])
        (first,) = await load.gathered()
    deaths = sum(worker.knobs.committed("poison") for worker in run.fleet.workers) - before
    run.requests += 2
    run.expect(first.status in (500, 503), f"it got {first.status}: {first.error}")
    run.expect(deaths <= MAX_DEATHS, f"it killed {deaths} workers, {MAX_DEATHS} are allowed")
    await run.fleet.all_ready(READY_TIMEOUT_S)
    async with run.load() as load:
        load.send([bad])
        (second,) = await load.gathered()
    again = sum(worker.knobs.committed("poison") for worker in run.fleet.workers) - before - deaths
    run.expect(second.error is not None, "it was answered")
    run.expect(again == 0, f"sent again, it killed another {again} workers: it is not remembered")
    run.notes.append(f"{deaths} deaths, then {again}")
