"""A cell that is lost with its Redis, beside one that is not (76)."""

import asyncio

from tandem_testing.chaos.fleet import CLUSTER, NEIGHBOUR, Shape
from tandem_testing.chaos.parts import Gateway
from tandem_testing.chaos.scenario import PATIENCE_S, SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Answer, Ask, Kind, Load
from tandem_testing.waiting import until

WAVES = 4
PAUSE_S = 2.0
"""Between them: all leases of the lost cell end in that time."""


async def cells_of(run: Run, answers: list[Answer]) -> set[str | None]:
    """Names of the cells in which these were served at last; None: the own one of their gateway."""
    found: set[str | None] = set()
    for answer in answers:
        attempts = await run.attempts(answer)
        if attempts:
            cell = attempts[-1]["cell"]
            found.add(None if cell is None else cell["name"])
    return found


async def serves_itself(run: Run, gateway: Gateway) -> bool:
    """Whether requests of this gateway are served in its own cell."""
    async with Load(urls=[gateway.url], model=run.fleet.model) as load:
        load.send(run.asks(Kind.PLAIN, count=4, tokens=16, first=700))
        answers = await load.gathered()
    await run.judge(answers)
    return await cells_of(run, answers) == {None}


@scenario(76, shape=Shape(prefill=1, decode=1, gateways=1, neighbour=True))
async def a_cell_dies_with_its_redis(run: Run) -> None:
    fleet, (home, neighbour) = run.fleet, run.fleet.gateways
    lost = [worker for worker in fleet.workers if worker.settings.cluster == CLUSTER]
    for gateway in (home, neighbour):
        # On a loaded machine a Redis may answer too late, and the other cell serves that request.
        await until(lambda gateway=gateway: serves_itself(run, gateway), PATIENCE_S, "each cell serves its own")
    asked: list[Ask] = []

    async def fault(load: Load) -> None:
        with fleet.no_restarts():
            fleet.redis.kill()
            for worker in lost:
                worker.kill()
            for wave in range(WAVES):
                # The last ones still speak when the cell comes back.
                tokens = 32 if wave < WAVES - 1 else 0
                more = run.asks(Kind.PLAIN, Kind.GREEDY, count=8, tokens=tokens, first=400 + 20 * wave)
                asked.extend(more)
                await asyncio.sleep(PAUSE_S if wave else 0.0)
                load.send(more)
                await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")
            fleet.redis.restart()

    answers = await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault)
    late = [answer for answer in answers if answer.ask in asked]
    moved = await cells_of(run, [answer for answer in late if answer.gateway == home.url])
    run.expect(moved == {NEIGHBOUR}, f"requests of the lost cell were served in {moved}")
    kept = await cells_of(run, [answer for answer in late if answer.gateway == neighbour.url])
    run.expect(kept == {None}, f"requests of the other cell were served in {kept}")
    began = run.now()
    await until(lambda: serves_itself(run, home), PATIENCE_S, "the lost cell serves again")
    run.notes.append(f"{len(late)} requests without the cell; it serves again after {run.now() - began:.1f} s")
