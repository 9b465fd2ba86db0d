"""Lines on which bytes vanish, in both directions or in one: to Redis, between gateways and workers, between peers (60
to 63, 66, 75).

Members are the workers that answer. So no request fails, no process ends, and Redis is asked again afterwards.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from tandem_services.router.membership import RETRY_LOST_AFTER_S
from tandem_testing.chaos.families.redis_faults import back_in_use
from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind, Load
from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.waiting import until

PROXIED = Shape(proxied=True)
UNCONNECTED = Shape(proxied=True, unconnected=True)
SILENT, UNANSWERED, UNHEARD = Weather(silent=True), Weather(unanswered=True), Weather(unheard=True)
ONE_WAY = {"clients receive nothing": UNANSWERED, "servers receive nothing": UNHEARD}
PARTITION_S = 15.0
"""Longer than any lease of the registry (`keys.FENCE_AFTER_MS`), and than peers take to ask whether one lives."""
SILENT_S = 6.0
"""Longer than it takes to give up a silent worker."""
FORGOTTEN_S = 1.2 * RETRY_LOST_AFTER_S
"""Longer than a worker that Redis has forgotten stays a member without an answer."""
WAVE_S = 0.5
BACKGROUND = 4
"""Streams that speak at any moment of a fault, however fast they are."""
DRAWN = 2
"""Variations of one scenario, apart from those that always run."""


def starts_of(run: Run) -> list[int]:
    return [part.starts for part in run.fleet.parts()]


def endless(run: Run) -> list[Ask]:
    """Streams that take seconds on any machine."""
    return run.fresh(run.asks(Kind.GREEDY, Kind.PLAIN, count=BACKGROUND, tokens=1500))


async def wave(run: Run, load: Load) -> None:
    """Short requests, and long ones where too few speak."""
    load.send(run.fresh(run.asks(Kind.PLAIN, Kind.GREEDY, count=2, tokens=48, prompt_words=100, first=700)))
    if load.speaking < BACKGROUND // 2:
        load.send(endless(run))
    await asyncio.sleep(WAVE_S)


async def waves(run: Run, load: Load, seconds: float) -> None:
    """Requests every half second, all of which begin to speak."""
    began = run.now()
    while run.now() - began < seconds:
        await wave(run, load)
    await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")


async def partitioned(run: Run, what: str, lines: Sequence[TcpProxy], weather: Weather) -> None:
    """`lines` are down under load. Every request is answered, nothing ends, and Redis is asked again afterwards."""
    starts, held = starts_of(run), [line.held for line in lines]

    async def fault(load: Load) -> None:
        for line in lines:
            line.weather = weather
        try:
            await waves(run, load, PARTITION_S)
            load.send(endless(run))
        finally:
            for line in lines:
                line.weather = CALM

    await run.under_fault(endless(run), fault)
    lost = [line.held - before for line, before in zip(lines, held, strict=True)]
    run.expect(all(lost), f"{what}: nothing was lost on a line: {lost}")
    run.expect(starts_of(run) == starts, f"{what}: a process ended because of it")
    await back_in_use(run)
    run.notes[-1] += f", after: {what}"


def workers_of(fleet: Fleet) -> dict[str, list[str]]:
    """Sets of workers by name, and the names of the workers."""
    roles = {role: [worker.id for worker in fleet.of_role(role)] for role in ("prefill", "decode")}
    return (
        {"all workers": [*roles["prefill"], *roles["decode"]]}
        | {f"all {role} workers": names for role, names in roles.items()}
        | {f"{names[0]} alone": names[:1] for names in roles.values()}
    )


def gateways_of(fleet: Fleet) -> dict[str, list[str]]:
    names = [gateway.part.name for gateway in fleet.gateways]
    return {"all gateways": names, f"{names[0]} alone": names[:1]}


@scenario(60, shape=PROXIED)
async def workers_lose_redis_and_gateways_keep_it(run: Run) -> None:
    """All of them, and two of the other sets."""
    all_workers, *others = workers_of(run.fleet).items()
    for name, users in (all_workers, *run.random.sample(others, DRAWN)):
        await partitioned(run, f"{name} without Redis", [run.fleet.redis_lines[user] for user in users], SILENT)


@scenario(75, shape=UNCONNECTED)
async def workers_that_were_never_asked_lose_redis(run: Run) -> None:
    """Redis forgets all of them long before the first request: no gateway has had an answer for one."""
    fleet, starts = run.fleet, starts_of(run)
    lines = [fleet.redis_lines[worker.id] for worker in fleet.workers]
    held = [line.held for line in lines]
    rows, _, _ = fleet.keys.shared
    try:
        for line in lines:
            line.weather = SILENT
        await until(lambda: fleet.redis.command("HLEN", rows).strip() == ":0", PATIENCE_S, "Redis forgets all workers")
        await asyncio.sleep(FORGOTTEN_S)
        since = run.now()
        async with run.load() as load:
            load.send(endless(run))
            await waves(run, load, SILENT_S)
            answers = await load.gathered()
    finally:
        for line in lines:
            line.weather = CALM
    await run.judge(answers, after=since)
    run.expect(all(line.held > before for line, before in zip(lines, held, strict=True)), "nothing was lost on a line")
    run.expect(starts_of(run) == starts, "a process ended because of it")
    await back_in_use(run)


@scenario(61, shape=PROXIED)
async def gateways_lose_redis_and_workers_keep_it(run: Run) -> None:
    for name, users in gateways_of(run.fleet).items():
        await partitioned(run, f"{name} without Redis", [run.fleet.redis_lines[user] for user in users], SILENT)


@scenario(62, shape=PROXIED)
async def redis_is_reached_in_one_direction_only(run: Run) -> None:
    """Two variations of gateways, and two of workers."""
    for sets in (gateways_of(run.fleet), workers_of(run.fleet)):
        matrix = [(name, direction) for name in sets for direction in ONE_WAY]
        for name, direction in run.random.sample(matrix, DRAWN):
            lines = [run.fleet.redis_lines[user] for user in sets[name]]
            await partitioned(run, f"{name} and Redis, {direction}", lines, ONE_WAY[direction])


@scenario(63, shape=PROXIED)
async def a_worker_is_reached_in_one_direction_only(run: Run) -> None:
    """One of each role, and gateways."""
    starts = starts_of(run)
    for role in ("decode", "prefill"):
        for direction, weather in ONE_WAY.items():
            victim = await in_use(run, role)
            await until_given_up(run, victim, f"gateways and a {role} worker, {direction}", weather)
    run.expect(starts_of(run) == starts, "a process ended because of it")
    await back_in_use(run)


async def in_use(run: Run, role: str) -> Worker:
    """The worker of `role` that most requests are on now. On a loaded machine one may have measured itself many times
    slower than the other, and gets none."""
    answers = await run.works(count=8)
    attempts = [attempt for answer in answers for attempt in await run.attempts(answer)]
    homes = Counter(str(attempt[role]).partition("@")[0] for attempt in attempts)
    return max(run.fleet.of_role(role), key=lambda worker: homes[worker.id])


async def until_given_up(run: Run, victim: Worker, what: str, weather: Weather) -> None:
    """Requests until some were on `victim`, and have left it."""
    line = victim.request_line
    assert line is not None, "the fleet is proxied"

    async def fault(load: Load) -> None:
        lost, began = await run.lost_attempts(), run.now()
        # A prefill worker has the request until its push: without a pause the decode worker would be soon enough.
        victim.knobs.turn(hold_push_s=SILENT_S)
        line.weather = weather
        try:
            while run.now() - began < SILENT_S or (
                await run.lost_attempts() == lost and run.now() - began < PATIENCE_S
            ):
                await wave(run, load)
        finally:
            load.send(endless(run))
            victim.knobs.turn()
            line.weather = CALM
        run.expect(await run.lost_attempts() > lost, f"{what}: no request was on it")

    # What was lost arrives now, all at once, while other workers generate.
    await run.under_fault(endless(run), fault)
    await run.fleet.all_ready(SPEAK_TIMEOUT_S)


@scenario(66, shape=PROXIED)
async def peers_reach_each_other_in_one_direction_only(run: Run) -> None:
    starts = starts_of(run)
    for role in ("decode", "prefill"):
        lines = [worker.peer_line for worker in run.fleet.of_role(role) if worker.peer_line is not None]
        for direction, weather in ONE_WAY.items():
            held = sum(line.held for line in lines)
            async with run.load() as load:
                for line in lines:
                    line.weather = weather
                since = run.now()
                asked = run.asks(Kind.GREEDY, Kind.PLAIN, tokens=32, prompt_words=200, count=8, first=800)
                load.send(run.fresh(asked))
                answers = await load.gathered()
            for line in lines:
                line.weather = CALM
            await run.judge(answers, after=since)
            run.expect(
                sum(line.held for line in lines) > held, f"peers and {role} workers, {direction}: nothing was lost"
            )
            await run.works()
    run.expect(starts_of(run) == starts, "a process ended because of it")
