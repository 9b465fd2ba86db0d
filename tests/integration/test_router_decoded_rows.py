"""Decoded rows are kept in Redis between decisions (scripts/worker.lua): they follow the row and the time."""

import pytest

from tandem_engine.config import Role
from tandem_lab.simulate.clock import DAY_MS, EventQueue, SimulatedRedis
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.cost import Demand
from tandem_services.router.index import Routed
from tandem_services.router.registry import WorkerState
from tandem_testing.router_builders import HOUR_MS, LASTING, MODEL, PAGE, Fleet, make_link, make_load, make_record

DEMAND = Demand(prompt_tokens=1000, output_tokens=16, local_prefill_tokens=2048)
FIRST, SECOND = make_record("first"), make_record("second")
ROUTE = {"model": MODEL, "demand": DEMAND, "page_size": PAGE, "chain": b"", "exclude": frozenset(), "seed": 1}


@pytest.fixture
async def simulated(server):
    server.command("FLUSHALL")
    simulated = SimulatedRedis(address=RedisAddress(url=server.url), cluster="default", events=EventQueue())
    await simulated.follow()
    yield simulated
    await simulated.client.close()


async def beat(simulated: SimulatedRedis, *records) -> None:
    for record in records:
        await simulated.registry.heartbeat(record, known_generation=0, report_age_s=0.0)


async def later(simulated: SimulatedRedis, seconds: float) -> None:
    simulated.events.after(seconds, simulated.follow)
    await simulated.events.run()


async def route(simulated: SimulatedRedis, *, exclude: frozenset[str] = frozenset()) -> Routed | None:
    return await simulated.index.route(model=MODEL, demand=DEMAND, page_size=PAGE, chain=b"", exclude=exclude, seed=1)


def only(record) -> frozenset[str]:
    """Leave out the other one."""
    return frozenset({(SECOND if record is FIRST else FIRST).view.incarnation})


def queue_s(routed: Routed | None) -> float:
    assert routed is not None
    return next(term.seconds for term in routed.terms if term.name == "prefill_queue")


async def test_reservation_expires_without_a_row_write(simulated):
    await beat(simulated, FIRST, SECOND)
    await route(simulated, exclude=only(FIRST))
    # The first worker's row is decoded with its reservation, and not written.
    assert queue_s(await route(simulated, exclude=only(SECOND))) == 0.0
    await later(simulated, 2.2)
    await route(simulated, exclude=only(SECOND))
    assert queue_s(await route(simulated, exclude=only(FIRST))) == pytest.approx(1.0)


async def test_reservation_that_has_lapsed_no_longer_counts(simulated):
    await beat(simulated, FIRST, SECOND)
    await route(simulated, exclude=only(FIRST))
    await route(simulated, exclude=only(SECOND))
    await later(simulated, 2.3)
    assert queue_s(await route(simulated, exclude=only(FIRST))) == 0.0


async def test_lease_expires_without_a_row_write(simulated):
    await beat(simulated, FIRST, SECOND)
    await route(simulated, exclude=only(SECOND))
    await later(simulated, DAY_MS / 1000 + 1)
    assert await route(simulated, exclude=only(FIRST)) is None


async def test_new_report_counts_at_once(simulated):
    await beat(simulated, FIRST)
    assert queue_s(await route(simulated)) == 0.0
    await later(simulated, 3.0)
    await beat(simulated, make_record("first", load=make_load(queue_tokens=500)))
    assert queue_s(await route(simulated)) == pytest.approx(0.5)


async def test_links_are_read_again_after_a_heartbeat(simulated):
    decode = make_record("d", Role.DECODE, load=make_load(sequences=60))
    for rate in (1e9, 1e5):
        await beat(simulated, decode, make_record("p", Role.PREFILL, links=(make_link(decode, rate),)))
        routed = await simulated.index.route(
            model=MODEL,
            demand=Demand(prompt_tokens=1000, output_tokens=16, local_prefill_tokens=0),
            page_size=PAGE,
            chain=b"",
            exclude=frozenset(),
            seed=1,
        )
        assert routed is not None
        transfer = next(term.seconds for term in routed.terms if term.name == "transfer")
        assert transfer == pytest.approx(0.002 + 1000 * 1000 / rate)
        await later(simulated, 1.0)


async def test_fleets_of_other_clusters_are_not_mixed_up(server, simulated):
    other = SimulatedRedis(address=RedisAddress(url=server.url), cluster="other", events=EventQueue())
    await other.follow()
    await beat(simulated, FIRST)
    await beat(other, make_record("first", load=make_load(queue_tokens=500)))
    for _ in range(2):
        assert queue_s(await route(other)) >= 0.5
        assert queue_s(await route(simulated)) < 2.5
    await other.client.close()


async def test_fleet_that_changes_all_its_workers_is_followed(simulated):
    for generation in range(3):
        names = [f"g{generation}-w{number}" for number in range(80)]
        for name in names:
            await beat(simulated, make_record(name))
        routed = await route(simulated)
        assert routed is not None
        for name in names:
            await simulated.registry.deregister(f"{name}@1")
    assert await route(simulated) is None


async def test_heartbeat_that_changes_the_kind_of_a_worker_regroups(simulated):
    """Its row is decoded by the heartbeat: no later comparison shows that it was another one."""
    await beat(simulated, FIRST, make_record("second", Role.PREFILL))
    assert (await route(simulated)).prefill is None
    await beat(simulated, make_record("first", Role.DECODE))
    routed = await route(simulated)
    assert (routed.prefill, routed.decode) == ("second@1", "first@1")
    await beat(simulated, make_record("first", Role.DECODE, state=WorkerState.DRAINING))
    assert await route(simulated) is None
    await beat(simulated, make_record("first", Role.DECODE))
    assert (await route(simulated)).decode == "first@1"


async def test_malformed_row_is_decoded_again_after_its_heartbeat(server, simulated):
    await beat(simulated, FIRST)
    server.command("HSET", f"{simulated.keys.prefix}fleet", "first@1", "malformed")
    server.command("HSET", f"{simulated.keys.prefix}meta", "generation", "7")
    assert await route(simulated) is None
    await beat(simulated, FIRST)
    assert (await route(simulated)).decode == "first@1"


def redis_ms(server) -> int:
    _, _, seconds, _, microseconds, _ = server.command("TIME").split("\r\n")
    return int(seconds) * 1000 + int(microseconds) // 1000


def next_millisecond(server) -> None:
    """Heartbeats are told apart by the time of Redis."""
    began = redis_ms(server)
    while redis_ms(server) == began:
        pass


async def test_writes_of_another_release_are_read(server):
    """Gateways of two releases share the rows, and each keeps what it has decoded."""
    async with Fleet.of(server) as ours:
        theirs = Fleet(server, SWEEP_STEP=63)

        async def decided(fleet: Fleet, *, by) -> Routed | None:
            return await fleet.index.route(**{**ROUTE, "exclude": only(by)})

        await ours.beat(FIRST)
        assert queue_s(await decided(ours, by=FIRST)) == 0.0
        await theirs.beat(SECOND)
        assert queue_s(await decided(ours, by=SECOND)) == 0.0
        assert await decided(theirs, by=SECOND) is not None
        next_millisecond(server)
        # Its reservation, and ours, after the next heartbeat of any worker.
        await theirs.beat(FIRST, report_age_s=1.0)
        assert queue_s(await decided(ours, by=SECOND)) == pytest.approx(2.0)
        await theirs.close()


def rows_read(server) -> int:
    """How often all rows of a hash were read, ever."""
    lines = server.command("INFO", "commandstats").splitlines()
    counts = [line.partition("calls=")[2].partition(",")[0] for line in lines if line.startswith("cmdstat_hgetall:")]
    return int(counts[0]) if counts else 0


async def test_decisions_between_heartbeats_read_no_rows(server):
    async with Fleet.of(server, **LASTING, SWEEP_EVERY_MS=HOUR_MS) as fleet:
        for record in (FIRST, SECOND):
            fleet.generation = (await fleet.beat(record)).generation
        assert queue_s(await fleet.index.route(**ROUTE)) == 0.0
        for queue_tokens in (500, 700):
            load = make_load(queue_tokens=queue_tokens)
            await fleet.beat(make_record("first", load=load))
            await fleet.beat(make_record("second", load=load))
            await fleet.registry.changes(fleet.generation)
            before = rows_read(server)  # heartbeats and views read the whole hash `meta`
            routed = await fleet.index.route(**ROUTE)
            assert queue_s(routed) >= queue_tokens / 1000
            await fleet.index.release(routed.reservation)
            assert rows_read(server) == before


async def test_reservation_and_release_are_seen_without_heartbeat(server):
    async with Fleet.of(server) as fleet:
        await fleet.beat(FIRST)
        routed = [await fleet.index.route(**ROUTE) for _ in range(3)]
        assert [queue_s(each) for each in routed] == pytest.approx([0.0, 1.0, 2.0])
        await fleet.index.release(routed[0].reservation)
        assert queue_s(await fleet.index.route(**ROUTE)) == pytest.approx(2.0)


async def decisions(server, *, kept: bool) -> list[tuple[str | None, str, dict[str, float]]]:
    """Choices and prices of a burst that lasts several reservation buckets and heartbeats. Unless `kept`, every
    decision reads all rows."""
    server.command("FLUSHALL")
    simulated = SimulatedRedis(address=RedisAddress(url=server.url), cluster="default", events=EventQueue())
    await simulated.follow()
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)
    steps_s = (0.0101, 0.0113, 0.012731, 0.013977, 0.015149)  # no two prices are equal

    async def report(number: int, queue_tokens: int) -> None:
        load = make_load(
            prefill_rate=1000.0 + 37 * number,
            queue_tokens=queue_tokens,
            sequences=number,
            step_s=steps_s[number],
            max_sequences=9,
            room_tokens=5000,
        )
        await beat(simulated, make_record(f"w{number}", roles[number], load=load))

    for number in range(len(roles)):
        await report(number, 11 * number)
    made = []
    for step in range(40):
        if step % 4 == 3:
            await report(step % len(roles), 17 * step)
        if not kept:
            server.command("FUNCTION", "FLUSH")
        routed = await route(simulated)
        assert routed is not None
        made.append((routed.prefill, routed.decode, {term.name: term.seconds for term in routed.terms}))
        await later(simulated, 0.09)
    await simulated.client.close()
    return made


async def test_decisions_are_equal_with_and_without_decoded_rows(server):
    kept = await decisions(server, kept=True)
    assert kept == await decisions(server, kept=False)
    assert len({decode for _, decode, _ in kept}) > 1
