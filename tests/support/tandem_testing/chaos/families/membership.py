"""What Redis says about members is wrong, or reaches only some processes (60 to 65).

Members are the workers that answer. So no request fails, no worker ends, and what was wrong is right again within
seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable

import redis.asyncio

from tandem_engine.ipc.keys import KeyPair
from tandem_testing.chaos.families.redis_faults import back_in_use, steady
from tandem_testing.chaos.fleet import GATEWAYS, START_TIMEOUT_S, Shape
from tandem_testing.chaos.scenario import SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.waiting import until

PROXIED = Shape(proxied=True)
PARTITION_S = 15.0
"""Longer than any lease of the registry (`keys.FENCE_AFTER_MS`), and than peers take to ask whether one lives."""
ONE_WAY_S = 6.0
"""Longer than it takes to give up a silent worker."""
WAVE_S = 0.5
BACK_S = 10.0
"""Of a worker that is started anew: the process and its model take as long as they take, the registry does not."""
OVERWRITTEN: dict[str, str | bytes] = {
    "text": "garbage",
    "negative": "-7",
    "huge": "9" * 400,
    "exponent": "1e300",
    "far future": "99999999999999",
    "bytes": b"\xff\x00" * 60,
}
ANOTHER_TYPE = ("LPUSH", "a", "b")


def starts_of(run: Run) -> list[int]:
    return [part.starts for part in run.fleet.parts()]


async def waves(run: Run, load: Load, seconds: float, *, first: int) -> None:
    """A few requests every half second, all of which begin to speak."""
    began, number = run.now(), first
    while run.now() - began < seconds:
        load.send(run.asks(Kind.PLAIN, Kind.GREEDY, count=2, tokens=64, first=number))
        number += 2
        await asyncio.sleep(WAVE_S)
    await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")


async def partitioned(run: Run, lines: list[TcpProxy], weather: Weather, seconds: float) -> None:
    """`lines` are down under load. Every request is answered, nothing ends, and Redis is asked again afterwards."""
    starts = starts_of(run)

    async def fault(load: Load) -> None:
        for line in lines:
            line.weather = weather
        try:
            await waves(run, load, seconds, first=700)
        finally:
            for line in lines:
                line.weather = CALM

    # They outlast the partition.
    await run.under_fault(run.asks(Kind.GREEDY, count=8, tokens=1500), fault)
    await back_in_use(run)
    run.expect(starts_of(run) == starts, "a process ended because of a partition")


@scenario(60, shape=PROXIED)
async def workers_lose_redis_and_gateways_keep_it(run: Run) -> None:
    for users in (("prefill", "decode"), ("prefill",), ("decode",)):
        lines = [run.fleet.redis_lines[role] for role in users]
        await partitioned(run, lines, Weather(silent=True), PARTITION_S)


@scenario(61, shape=PROXIED)
async def gateways_lose_redis_and_workers_keep_it(run: Run) -> None:
    await partitioned(run, [run.fleet.redis_lines[GATEWAYS]], Weather(silent=True), PARTITION_S)


@scenario(62, shape=PROXIED)
async def redis_is_heard_or_answers_in_one_direction_only(run: Run) -> None:
    for users in ((GATEWAYS,), ("prefill", "decode")):
        lines = [run.fleet.redis_lines[user] for user in users]
        for weather in (Weather(unanswered=True), Weather(unheard=True)):
            await partitioned(run, lines, weather, PARTITION_S if weather.unanswered else ONE_WAY_S)


@scenario(63, shape=PROXIED)
async def a_worker_is_heard_or_hears_in_one_direction_only(run: Run) -> None:
    """One of each role, and gateways."""
    for role in ("decode", "prefill"):
        for weather in (Weather(unanswered=True), Weather(unheard=True)):
            line = run.fleet.of_role(role)[0].request_line
            assert line is not None, "the fleet is proxied"
            await partitioned(run, [line], weather, ONE_WAY_S)


@scenario(64, timeout_s=900.0)
async def every_field_of_the_registry_is_overwritten(run: Run) -> None:
    """One after the other, and workers are started anew meanwhile."""
    keys, starts, overwritten = run.fleet.keys, starts_of(run), 0
    fleet, owner, meta = keys.shared

    async def fault(load: Load) -> None:
        nonlocal overwritten
        async with redis.asyncio.Redis.from_url(run.fleet.redis_url) as client:
            for name, value in OVERWRITTEN.items():
                for key in (meta, owner, fleet, keys.worker("decode-0"), keys.worker("prefill-0")):
                    fields = [*await client.hkeys(key), "deployment", "deployment_until", "generation"]
                    for field in fields:
                        await client.hset(key, field, value)
                        overwritten += 1
                    await a_few(run, load, f"{name} in {key}")
            for key in (meta, owner, fleet, keys.worker("decode-0")):
                await client.delete(key)
                await client.execute_command(ANOTHER_TYPE[0], key, *ANOTHER_TYPE[1:])
                await a_few(run, load, f"another type at {key}")

    async def a_few(run: Run, load: Load, what: str) -> None:
        asked = run.asks(Kind.PLAIN, count=2, tokens=16, first=3000 + 2 * len(load.answers))
        load.send(asked)
        await asyncio.sleep(0.3)
        refused = [load.answers[ask].error for ask in asked if load.answers[ask].error]
        run.expect(not refused, f"{what}: {refused[:1]}")

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN, count=4, tokens=1500), fault)
    run.notes.append(f"{overwritten} fields were overwritten")
    run.expect(starts_of(run) == starts, "a process died of what Redis said")
    await back_in_use(run, BACK_S)
    await registers_with_a_garbled_generation(run)


async def registers_with_a_garbled_generation(run: Run) -> None:
    victim = run.fleet.of_role("decode")[0]
    starts, meta = victim.part.starts, run.fleet.keys.shared[2]
    run.fleet.redis.command("HSET", meta, "generation", "garbage")
    victim.kill()
    await until(lambda: victim.part.starts > starts, START_TIMEOUT_S, "it is started anew")
    await run.fleet.all_ready(START_TIMEOUT_S)
    await run.works()


async def with_a_second_deployment(run: Run, then: Callable[[Load], Awaitable[None]]) -> None:
    """Another deployment's worker, with the same cluster name and the name of one of ours, while `then` happens."""
    other_keys = run.fleet.folder / "other-keys.json"
    KeyPair.generate().save(other_keys)
    twin = await run.fleet.add_worker("decode-0", "decode", kept=False, curve_keys=str(other_keys))
    try:
        await until(
            lambda: run.fleet.is_ready(twin.url), START_TIMEOUT_S, "the other deployment serves", twin.part.said
        )
        await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN, tokens=512), then)
        run.expect(twin.part.alive, "the second deployment was ended")
        requests = await run.fleet.metric(twin.url, "tandem_worker_prompt_tokens_total")
        run.expect(requests == 0, "a request of one deployment reached the other")
    finally:
        await run.fleet.remove_worker(twin)


@scenario(65)
async def a_second_deployment_takes_the_cluster_name_after_a_wipe(run: Run) -> None:
    starts = starts_of(run)

    async def fault(load: Load) -> None:
        for _ in range(3):
            run.fleet.redis.command("FLUSHALL")
            await steady(run, load)
            ready = await asyncio.gather(*(run.fleet.is_ready(gateway.url) for gateway in run.fleet.gateways))
            run.expect(all(ready), "a gateway is not ready")

    await with_a_second_deployment(run, fault)
    run.expect(starts_of(run) == starts, "a process ended because of another deployment")
    await back_in_use(run)
