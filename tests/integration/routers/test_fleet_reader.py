"""A reader that reads differences sees the fleet that a reader of everything sees."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import redis

from tandem_engine.config import Role
from tandem_lab.simulate.clock import DAY_MS, EventQueue, SimulatedRedis
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.router.keys import MAX_DESCRIBED
from tandem_services.router.registry import FleetChanges, Registry, WorkerState
from tandem_services.router.views import fleet_reader
from tandem_services.router.views.fleet_reader import FleetReader
from tandem_testing.router_builders import LASTING, Fleet, make_record
from tandem_testing.service_clock import ServiceClock


@dataclass
class Counted:
    """A registry that counts calls, lists and descriptions."""

    registry: Registry
    calls: int = 0
    listings: int = 0
    described: list[str] = field(default_factory=list)
    failing: int = 0
    """The number of calls that succeed before one fails; 0: all succeed."""

    async def changes(self, since: int, **options: Any) -> FleetChanges:
        if self.failing:
            self.failing -= 1
            if not self.failing:
                raise RedisUnavailableError("away")
        changes = await self.registry.changes(since, **options)
        self.calls += 1
        self.listings += changes.listed is not None
        self.described += options.get("described", ())
        return changes


@pytest.fixture
def differences_alone(monkeypatch) -> None:
    """Nothing but what Redis calls a change is read again."""
    monkeypatch.setattr(fleet_reader, "SMALL_FLEET", -1)
    monkeypatch.setattr(fleet_reader, "REREAD", 0)
    monkeypatch.setattr(fleet_reader, "LISTED_A_SECOND", 1e-9)


def reader_of(fleet: Fleet) -> tuple[FleetReader, Counted]:
    counted = Counted(fleet.registry)
    return FleetReader(registry=counted, clock=ServiceClock()), counted


async def seen_by(reader: FleetReader) -> dict[str, Any]:
    snapshot = await reader.snapshot()
    return {record.view.incarnation: (record.view, record.state) for record in snapshot.workers}


async def check_same(fleet: Fleet, *readers: FleetReader) -> None:
    fresh = FleetReader(registry=fleet.registry, clock=ServiceClock())
    expected = await seen_by(fresh)
    for reader in readers:
        assert await seen_by(reader) == expected


def steps(random: Random) -> Iterator[tuple[str, int, WorkerState, Role]]:
    """What happens to workers, by name, number, state and role."""
    for _ in range(60):
        name = f"w{random.randrange(12)}"
        yield name, random.randrange(1, 4), random.choice([*WorkerState]), random.choice([*Role])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("differences_alone")
async def test_differences_add_up_to_the_fleet(server, seed):
    """One reader reads after every step, one seldom: it misses more changes than Redis remembers."""
    random = Random(seed)
    async with Fleet.of(server, **LASTING, MAX_CHANGES=8) as fleet:
        (often, counted), (seldom, _) = reader_of(fleet), reader_of(fleet)
        for position, (name, number, state, role) in enumerate(steps(random)):
            if random.random() < 0.3:
                await fleet.registry.deregister(f"{name}@{number}")
            else:
                await fleet.beat(make_record(name, role, number=number, state=state))
            if position == 40:
                server.wipe()
            await check_same(fleet, often, *([seldom] if position % 15 == 14 else []))
        assert counted.listings < counted.calls / 4, "it reads everything too often to test differences"


@pytest.mark.usefixtures("differences_alone")
async def test_change_without_a_note_makes_readers_read_all(server):
    """A release without notes raises the generation."""
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("w1"))
        reader, counted = reader_of(fleet)
        await check_same(fleet, reader)
        await fleet.beat(make_record("w2"))
        server.command("ZREM", fleet.keys.prefix + "changes", "w2@1")
        assert counted.listings == 1
        await check_same(fleet, reader)
        assert counted.listings == 2


@pytest.mark.usefixtures("differences_alone")
async def test_generation_from_the_future_makes_a_reader_read_all(server):
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("w1"))
        changes = await fleet.registry.changes(2**53)
        assert (changes.changed, changes.listed) == (None, {"w1@1"})
        changes = await fleet.registry.changes(changes.generation)
        assert (changes.changed, changes.listed) == (frozenset(), None)


@pytest.mark.usefixtures("differences_alone")
async def test_failover_to_a_late_replica_hides_no_change(server):
    """The new primary gives numbers to its changes that the old one gave to others."""
    async with Fleet.of(server, **LASTING) as fleet:
        for name in ("w1", "w2", "w3", "w4"):
            await fleet.beat(make_record(name))
        reader, _ = reader_of(fleet)
        await reader.snapshot()
        with closing(redis.Redis.from_url(server.url)) as raw:
            replica = {key: raw.dump(key) for key in raw.scan_iter()}
            for name in ("w1", "w2"):
                await fleet.registry.deregister(f"{name}@1")
            fleet.generation = (await fleet.beat(make_record("w4"))).generation
            await check_same(fleet, reader)
            raw.flushall()
            raw.function_flush()
            for key, value in replica.items():
                raw.restore(key, 0, value)
        for name in ("w3", "w5", "w6"):
            reply = await fleet.beat(make_record(name, state=WorkerState.DRAINING))
        assert {*(reply.members or ())} == {f"w{number}@1" for number in range(1, 7)}
        await check_same(fleet, reader)


@pytest.mark.usefixtures("differences_alone")
async def test_wipe_after_many_changes_at_once_hides_no_change(server):
    """More changes than the clock of Redis has counted milliseconds."""
    server.command("FLUSHALL")
    simulated = SimulatedRedis(address=RedisAddress(url=server.url), cluster="default", events=EventQueue())
    reader = FleetReader(registry=simulated.registry, clock=ServiceClock())
    for names in (range(5), range(10, 20)):
        server.command("FLUSHALL")
        simulated.events.after(0.001, simulated.follow)
        await simulated.events.run()
        for name in names:
            await simulated.registry.heartbeat(make_record(f"w{name}"), known_generation=0, report_age_s=0.0)
        assert {*await seen_by(reader)} == {f"w{name}@1" for name in names}
    await simulated.client.close()


@pytest.mark.parametrize("lost", ["fleet", "owner"])
@pytest.mark.usefixtures("differences_alone")
async def test_loss_that_one_caller_finds_reaches_all_readers(server, lost):
    async with Fleet.of(server, **LASTING) as fleet:
        for name in ("w1", "w2"):
            fleet.generation = (await fleet.beat(make_record(name))).generation
        reader, _ = reader_of(fleet)
        await reader.snapshot()
        server.command("SET", fleet.keys.prefix + lost, "garbage")
        await fleet.snapshot()
        assert {*((await fleet.beat(make_record("w2"))).members or ())} == {"w2@1"}
        await check_same(fleet, reader)


@pytest.mark.usefixtures("differences_alone")
async def test_more_changes_than_redis_notes_are_never_returned(server):
    async with Fleet.of(server, **LASTING, MAX_CHANGES=8) as fleet:
        generation = (await fleet.beat(make_record("w1"))).generation
        foreign = [str(part) for number in range(9) for part in (generation, f"x{number}@1")]
        server.command("ZADD", fleet.keys.prefix + "changes", *foreign)
        changes = await fleet.registry.changes(generation - 1)
        assert (changes.changed, changes.listed) == (None, {"w1@1"})


async def test_longer_names_than_workers_have_are_never_returned(server):
    async with Fleet.of(server, **LASTING) as fleet:
        generation = (await fleet.beat(make_record("w1"))).generation
        long = "x" * 1_000_000 + "@1"
        server.command("ZADD", fleet.keys.prefix + "changes", str(generation), long)
        row = await fleet.client.command("HGET", fleet.keys.shared[0], "w1@1")
        await fleet.client.command("HSET", fleet.keys.shared[0], long, row)
        changes = await fleet.registry.changes(generation - 1, listed=True)
        assert (changes.changed, changes.listed) == ({"w1@1"}, {"w1@1"})


@pytest.mark.usefixtures("differences_alone")
async def test_lease_that_ends_and_begins_again_is_a_change(server):
    server.command("FLUSHALL")
    simulated = SimulatedRedis(address=RedisAddress(url=server.url), cluster="default", events=EventQueue())
    counted = Counted(simulated.registry)
    reader = FleetReader(registry=counted, clock=ServiceClock())

    async def seen(after_s: float, *beating: str) -> set[str]:
        simulated.events.after(after_s, simulated.follow)
        await simulated.events.run()
        for name in beating:
            await simulated.registry.heartbeat(make_record(name), known_generation=0, report_age_s=0.0)
        return {*await seen_by(reader)}

    half_s = DAY_MS / 2000
    assert await seen(1, "stays", "w1") == {"stays@1", "w1@1"}
    assert await seen(half_s, "stays") == {"stays@1", "w1@1"}
    assert await seen(half_s + 2, "stays") == {"stays@1"}
    assert await seen(1, "stays", "w1") == {"stays@1", "w1@1"}
    assert counted.listings == 1
    await simulated.client.close()


async def test_join_costs_each_reader_one_description(server):
    """Also in a storm of joins, and of a fleet that takes several calls to describe."""
    async with Fleet.of(server, **LASTING) as fleet:
        count = MAX_DESCRIBED + 40
        await asyncio.gather(*(fleet.beat(make_record(f"w{number}")) for number in range(count)))
        reader, counted = reader_of(fleet)
        assert len(await seen_by(reader)) == count
        assert (counted.calls, counted.listings, len(counted.described)) == (3, 1, count)
        for late in range(100):
            await fleet.beat(make_record(f"late-{late}"))
            if late % 10 == 9:
                assert len(await seen_by(reader)) == count + late + 1
        assert counted.listings == 1
        assert len(counted.described) == count + 100 + 10 * fleet_reader.REREAD


async def test_large_fleet_at_rest_costs_a_read_few_descriptions(server):
    async with Fleet.of(server, **LASTING) as fleet:
        count = fleet_reader.SMALL_FLEET + 8
        for number in range(count):
            await fleet.beat(make_record(f"w{number}"))
        reader, counted = reader_of(fleet)
        await reader.snapshot()
        counted.described.clear()
        for _ in range(count // fleet_reader.REREAD):
            await reader.snapshot()
            await fleet.beat(make_record("w1"))
        assert counted.listings == 1
        assert sorted(counted.described) == sorted(f"w{number}@1" for number in range(count)), "each of them once"


async def test_figures_that_people_look_at_are_read_by_each_read(server):
    async with Fleet.of(server, **LASTING) as fleet:
        count, clock = fleet_reader.SMALL_FLEET + 8, ServiceClock()
        for number in range(count):
            await fleet.beat(make_record(f"w{number}"))
        counted = Counted(fleet.registry)
        reader = FleetReader(registry=counted, clock=clock)
        await reader.snapshot()
        reader.viewed()
        for expected in (count, count, fleet_reader.REREAD):
            counted.described.clear()
            await reader.snapshot()
            assert len(counted.described) == expected
            clock.advance(fleet_reader.VIEWED_S / 2)


@pytest.mark.usefixtures("differences_alone")
async def test_read_that_fails_between_calls_loses_nothing(server):
    async with Fleet.of(server, **LASTING) as fleet:
        await fleet.beat(make_record("w1"))
        reader, counted = reader_of(fleet)
        await reader.snapshot()
        await fleet.beat(make_record("w2"))
        counted.failing = 2
        with pytest.raises(RedisUnavailableError):
            await reader.snapshot()
        await check_same(fleet, reader)


async def test_concurrent_reads_are_serialized(server):
    async with Fleet.of(server, **LASTING) as fleet:
        for number in range(4):
            await fleet.beat(make_record(f"w{number}"))
        reader, _ = reader_of(fleet)
        for snapshot in await asyncio.gather(*(reader.snapshot() for _ in range(4))):
            assert len(snapshot.workers) == 4
