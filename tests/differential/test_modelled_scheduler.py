"""The simulator's scheduler admits, computes and retracts as the engine's does, step by step, in random schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import pytest

from tandem_engine.config import SchedulerConfig
from tandem_engine.messages.kv_events import chain_hashes, chain_seed
from tandem_engine.scheduler.planner import Hold, Planner, StepPlan
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.retraction import Retraction
from tandem_lab.simulate.block_cache import BlockCache
from tandem_lab.simulate.jobs import Job
from tandem_lab.simulate.scheduler import ModelledScheduler
from tandem_testing.scheduler_builders import VOCAB, make_engine, make_message

SCHEDULES = 200
MAX_STEPS = 20_000


class Arrival(NamedTuple):
    """Before the step of this number."""

    step: int
    name: str
    prompt: tuple[int, ...]
    output: int


class Planned(NamedTuple):
    """What was decided for one step."""

    retracted: tuple[str, ...]
    prompts: tuple[tuple[str, int, int], ...]
    """(Request, first token, end)."""
    decodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    pages: int
    page_size: int
    config: SchedulerConfig
    arrivals: list[Arrival]


def random_schedule(seed: int) -> Schedule:
    """Prompts of a few families, in a pool that often cannot hold what it has admitted."""
    random = Random(seed)
    page_size = random.choice((1, 4, 16))
    longest = random.choice((24, 64, 120))
    families = [[random.randrange(1, VOCAB) for _ in range(longest)] for _ in range(3)]
    arrivals, step = [], 0
    for number in range(random.randrange(3, 24)):
        step += random.choice((0, 0, 1, 3, 20))
        shared = random.choice(families)[: random.randrange(longest)]
        own = [random.randrange(1, VOCAB) for _ in range(random.randrange(3, 12))]
        arrivals.append(Arrival(step, f"r{number}", (*shared, *own), random.randrange(1, random.choice((4, 80)))))
    least = max(-(-(len(each.prompt) + each.output) // page_size) for each in arrivals)
    chunk = random.choice((8, 32, 200))
    config = SchedulerConfig(
        context_length=400,
        max_running_requests=random.choice((2, 6, 64)),
        max_prefill_tokens=chunk,
        chunked_prefill_size=chunk,
        watermark=random.choice((0.0, 0.1)),
        init_new_token_ratio=random.choice((0.1, 0.7, 1.0)),
        new_token_ratio_decay_steps=random.choice((5, 600)),
        max_retractions=1000,
        audit_every_step=True,
        enable_overlap=False,
    )
    return Schedule(pages=least + random.randrange(1, least + 2), page_size=page_size, config=config, arrivals=arrivals)


def run_to_the_end(schedule: Schedule, add: Callable[[Arrival], None], turn: Callable[[int | None], int]) -> None:
    """`turn` computes at most so many steps, and returns how many; 0 when there is nothing to do."""
    coming, step = list(schedule.arrivals), 0
    for _ in range(MAX_STEPS):
        while coming and coming[0].step <= step:
            add(coming.pop(0))
        passed = turn(coming[0].step - step if coming else None)
        if not passed and not coming:
            return
        step = step + passed if passed else coming[0].step
    raise AssertionError(f"not idle after {MAX_STEPS} turns")


def engine_log(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> list[Planned]:
    """By the real scheduler over a fake executor."""
    config = {name: getattr(schedule.config, name) for name in SchedulerConfig.__slots__}
    engine = make_engine(page_size=schedule.page_size, usable_pages=schedule.pages, max_rows=64, **config)
    log: list[Planned] = []
    retracted: list[str] = []
    put_back, plan = Retraction._put_back, Planner.plan

    def note_retraction(self: Retraction, req: Request, decodes: list[Request]) -> None:
        retracted.append(req.rid)
        put_back(self, req, decodes)

    def note_plan(self: Planner, *, in_flight: bool) -> StepPlan | Hold:
        found = plan(self, in_flight=in_flight)
        if isinstance(found, StepPlan):
            prompts = tuple((extend.req.rid, extend.start, extend.stop) for extend in found.extends)
            log.append(Planned(tuple(retracted), prompts, tuple(req.rid for req in found.decodes)))
            retracted.clear()
        return found

    def add(arrival: Arrival) -> None:
        engine.clock.time += 1e-3
        engine.add(make_message(arrival.name, arrival.prompt, max_tokens=arrival.output))

    def turn(_: int | None) -> int:
        before = len(log)
        if not engine.scheduler.idle:
            engine.step()
        return len(log) - before

    with monkeypatch.context() as patched:
        patched.setattr(Retraction, "_put_back", note_retraction)
        patched.setattr(Planner, "plan", note_plan)
        run_to_the_end(schedule, add, turn)
    assert engine.scheduler.idle
    return log


def modelled_log(schedule: Schedule) -> list[Planned]:
    """By the simulator's, which computes equal steps together."""
    names: dict[int, str] = {}
    log: list[Planned] = []
    retracted: list[str] = []
    running: dict[str, None] = {}

    def put_back(job: Job) -> None:
        retracted.append(names[job.serial])
        running.pop(names[job.serial], None)

    scheduler = ModelledScheduler(
        name="worker",
        cache=BlockCache(schedule.pages),
        block_tokens=schedule.page_size,
        config=schedule.config,
        on_cache_change=lambda: None,
        on_retracted=put_back,
        caches_outputs=True,
    )

    def add(arrival: Arrival) -> None:
        job = Job(
            chain=chain_hashes(arrival.prompt, schedule.page_size, parent=chain_seed("")),
            prompt_tokens=len(arrival.prompt),
            output_tokens=arrival.output,
            on_prompt=lambda: None,
            on_end=lambda: None,
            serial=len(names) + 1,
        )
        names[job.serial] = arrival.name
        scheduler.waiting.append(job)

    def turn(most: int | None) -> int:
        step = scheduler.plan()
        if step is None:
            return 0
        decodes = tuple(running) if step.rows else ()
        prompts = tuple(
            (names[part.job.serial], part.job.computed, part.job.computed + part.tokens) for part in step.prompts
        )
        count = step.count if most is None else min(most, step.count)
        log.append(Planned(tuple(retracted), prompts, decodes))
        log.extend([Planned((), (), decodes)] * (count - 1))
        retracted.clear()
        end = scheduler.end(step, count)
        running.update(dict.fromkeys(names[job.serial] for job in end.prompts))
        for job in end.ended:
            del running[names[job.serial]]
        return count

    run_to_the_end(schedule, add, turn)
    assert (scheduler.sequences, len(scheduler.waiting)) == (0, 0)
    return log


@pytest.mark.parametrize("first", range(0, SCHEDULES, 20))
def test_modelled_scheduler_equals_the_engine_in_every_step(first, monkeypatch):
    for seed in range(first, first + 20):
        schedule = random_schedule(seed)
        expected, found = engine_log(schedule, monkeypatch), modelled_log(schedule)
        for number, (engine, model) in enumerate(zip(expected, found, strict=False)):
            assert model == engine, f"seed {seed}, step {number}"
        assert len(found) == len(expected), f"seed {seed}"


def test_random_schedules_retract_chunk_and_share(monkeypatch):
    logs = [engine_log(random_schedule(seed), monkeypatch) for seed in range(0, SCHEDULES, 10)]
    retracting = sum(any(step.retracted for step in log) for log in logs)
    sharing = sum(any(start > 0 for step in log for _, start, _ in step.prompts) for log in logs)
    assert (retracting > len(logs) // 4, sharing > len(logs) // 2) == (True, True)
