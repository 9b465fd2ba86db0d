"""Exceptions in functions of engines and of their services, one at a time (72, 73).

A fault may end its process, which the fleet's keeper starts again. Each request is answered as without it, in time, and
a process that continues has released all pages.
"""

import asyncio
import contextlib
from collections import Counter

from tandem_testing.chaos.fleet import Shape
from tandem_testing.chaos.knobs import ENGINE, WORKER
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind
from tandem_testing.waiting import until

RAISING = Shape(raising=True)
KINDS = (Kind.GREEDY, Kind.SEEDED, Kind.PLAIN, Kind.CHOICES, Kind.SCHEMA, Kind.REGEX, Kind.PENALIZED, Kind.TOOL)
REQUESTS, TOKENS = 8, 24
DISTINCT = 4
"""Loads that differ: the reference answers each once."""
DRAWN = 4
"""Functions for each fault at most: one that ran while functions were collected may not run again."""
LATER_S = 1.0
"""For functions that run once a second."""
IDLE_S = 60.0
LOG = "exceptions.log"
"""A line for each fault, beside the logs of the processes."""


@scenario(72, shape=RAISING, timeout_s=3 * 3600.0)
async def exceptions_in_engines(run: Run) -> None:
    await raise_everywhere(run, ENGINE)


@scenario(73, shape=RAISING, timeout_s=3 * 3600.0)
async def exceptions_in_services(run: Run) -> None:
    await raise_everywhere(run, WORKER)


async def raise_everywhere(run: Run, process: str) -> None:
    """In functions that the seed of the suite chooses, among all that run while requests are served."""
    places = await functions(run, process)
    run.random.shuffle(places)
    ends: Counter[str] = Counter()
    for number, (role, name) in enumerate(places[: run.scale.exceptions * DRAWN]):
        if ends["raised"] + ends["ended"] == run.scale.exceptions:
            break
        ends[await raise_once(run, await victim_of(run, role), process, name, number)] += 1
    run.expect(ends["raised"] + ends["ended"], "no function raised")
    counts = ", ".join(f"{ends[end]} {end}" for end in ("raised", "ended", "not called"))
    run.notes.append(f"{process}: {counts}, of {len(places)} functions")


async def functions(run: Run, process: str) -> list[tuple[str, str]]:
    """Role, and a function that ran in a process of such a worker under load; each function once."""
    found: dict[str, str] = {}
    for worker in run.fleet.workers:
        faults = worker.faults(process)
        # Tests of links, leases and reports run without requests as well.
        with faults.learning():
            await load(run, 0)
            await asyncio.sleep(LATER_S)
        for name in faults.names():
            found.setdefault(name, worker.role)
    return sorted((role, name) for name, role in found.items())


async def load(run: Run, number: int, *, after: float | None = None) -> None:
    async with run.load() as load:
        load.send(run.fresh(run.asks(*KINDS, count=REQUESTS, tokens=TOKENS, first=2000 + 10 * (number % DISTINCT))))
        answers = await load.gathered()
    await run.judge(answers, after=after)


async def victim_of(run: Run, role: str) -> Worker:
    """A worker that is ready, beside another one: streams need it while their own starts again."""
    workers = run.fleet.of_role(role)

    async def ready() -> bool:
        return all(await asyncio.gather(*(run.fleet.is_ready(worker.url) for worker in workers)))

    await until(ready, READY_TIMEOUT_S, f"every worker of role {role} ready", run.fleet.logs)
    return run.random.choice(workers)


async def raise_once(run: Run, victim: Worker, process: str, name: str, number: int) -> str:
    """What became of it: `not called`, `raised`, or `ended` with its process."""
    faults, starts, problems = victim.faults(process), victim.part.starts, len(run.problems)
    before, began = len(faults.fallen()), run.now()
    faults.arm(name)
    await load(run, number, after=began)
    with contextlib.suppress(AssertionError):
        await until(lambda: len(faults.fallen()) > before, LATER_S, f"{name} is called")
    faults.disarm()
    end = "not called"
    if len(faults.fallen()) > before:
        end = "raised" if await survives(run, victim, starts) else "ended"
    if end == "raised":
        await idle(run, victim, starts)
    run.problems[problems:] = [f"{process} of {victim.id}, {name}: {problem}" for problem in run.problems[problems:]]
    with (run.fleet.folder / LOG).open("a", encoding="utf-8") as log:
        log.write(f"{run.now() - began:.1f} s {process} of {victim.id}, {name}: {end}\n")
        log.writelines(f"    {problem}\n" for problem in run.problems[problems:])
    return end


async def survives(run: Run, victim: Worker, starts: int) -> bool:
    """A process that ends takes a moment; one that neither serves nor ends is found by the wait for its readiness."""
    await asyncio.sleep(LATER_S)
    return victim.part.alive and victim.part.starts == starts and await run.fleet.is_ready(victim.url)


async def idle(run: Run, victim: Worker, starts: int) -> None:
    """Wait until no page is in use, unless the process has ended after all."""

    async def free() -> bool:
        if not victim.part.alive or victim.part.starts != starts:
            return True
        report = await run.fleet.audit(victim) or {}
        return bool(report.get("idle")) and report["private_pages"] == report["held_pages"] == 0

    try:
        await until(free, IDLE_S, f"{victim.id} idle")
    except AssertionError:
        run.expect(False, f"pages are in use {IDLE_S:g} s later: {await run.fleet.audit(victim)}")
