"""Lines between processes that are cut, slow, or silent (21 to 23, 54). A proxy stands in each.

KV itself does not pass a proxy: NIXL moves it through shared memory on one machine, and its addresses are inside
its own metadata. What is disturbed between peers is everything they agree on: hellos, grants, records, leases.
"""

import asyncio

from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.scenario import SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.waiting import until

PROXIED = Shape(proxied=True)
CUT_OFF_S = 8.0


def peer_lines(fleet: Fleet) -> list[TcpProxy]:
    return [worker.peer_line for worker in fleet.workers if worker.peer_line is not None]


@scenario(21, shape=PROXIED)
async def a_decode_worker_is_cut_off_from_the_gateways(run: Run) -> None:
    lost = await run.lost_attempts()

    async def fault(load: Load) -> None:
        victim = await run.busiest_decode(load)
        assert victim.request_line is not None, "the fleet is proxied"
        victim.request_line.weather = Weather(silent=True)
        await asyncio.sleep(CUT_OFF_S)
        load.send(run.asks(Kind.GREEDY, Kind.SEEDED, first=400))
        await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")
        # The worker's messages of that time arrive now, all at once, beside streams that others generate.
        victim.request_line.weather = CALM

    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
    run.expect(await run.lost_attempts() > lost, "no stream was on the worker that was cut off")
    await run.works()


@scenario(22, shape=PROXIED)
async def prefill_is_cut_off_from_decode(run: Run) -> None:
    async with run.load() as load:
        for line in peer_lines(run.fleet):
            line.weather = Weather(silent=True)
        since = run.now()
        load.send(run.asks(Kind.GREEDY, Kind.PLAIN, tokens=32, prompt_words=200, count=8))
        answers = await load.gathered()
    for line in peer_lines(run.fleet):
        line.weather = CALM
    await run.judge(answers, after=since)
    await run.works()


@scenario(23, shape=PROXIED)
async def the_lines_between_peers_are_bad(run: Run) -> None:
    bad = (
        Weather(delay_s=0.5, jitter_s=0.1),
        Weather(stalls=0.3),
        Weather(stalls=0.5),
        Weather(bytes_per_s=125_000),
    )
    for number, weather in enumerate(bad):
        for line in peer_lines(run.fleet):
            line.weather = weather
        async with run.load() as load:
            load.send(run.asks(Kind.GREEDY, Kind.PLAIN, tokens=32, prompt_words=200, count=8, first=20 * number))
            await run.judge(await load.gathered())


@scenario(54, shape=PROXIED)
async def every_connection_is_cut(run: Run) -> None:
    """First while they are idle, then in the middle of streams."""
    await run.works(8)
    lines = [line for worker in run.fleet.workers for line in (worker.request_line, worker.peer_line) if line]
    carried = sum(line.connections for line in lines)
    run.expect(carried > 0, "no connection went through a proxy")
    for line in [*lines, *run.fleet.redis_lines.values()]:
        line.cut()
    async with run.load() as load:
        since = run.now()
        load.send(run.asks(Kind.GREEDY, count=4, tokens=16, prompt_words=120, first=600))
        await run.judge(await load.gathered(), after=since)
    lost = await run.lost_attempts()

    async def fault(_: Load) -> None:
        for line in lines:
            line.cut()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
    run.expect(await run.lost_attempts() > lost, "no stream was cut")
