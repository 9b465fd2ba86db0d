"""Leases, fencing and snapshots against a real Redis."""

import asyncio
import time

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import Demand
from tandem_services.router.registry import Endings, LeaseStatus, WorkerState
from tandem_testing.redis_calls import (
    documented_rules,
    every_call,
    every_call_noted,
    functions_of,
    registered_functions,
)
from tandem_testing.redis_fleets import grant
from tandem_testing.router_builders import HOUR_MS, MODEL, PAGE, Fleet, chain_of, make_link, make_load, make_record

BRIEF = {"LEASE_MS": 400, "FENCE_AFTER_MS": HOUR_MS, "SWEEP_EVERY_MS": 0}
"""A lease that a test can wait for, and no worker is fenced."""
SHORT = {"LEASE_MS": 1_500, "FENCE_AFTER_MS": 3_000, "SWEEP_EVERY_MS": 0}
"""A fencing period that a test can wait for, and longer than any machine takes for a few calls."""


@pytest.fixture
async def brief(server):
    async with Fleet.of(server, **BRIEF) as workers:
        yield workers


async def names(workers: Fleet) -> set[str]:
    return {record.view.incarnation for record in (await workers.snapshot()).workers}


async def until(condition, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def until_offered(workers: Fleet, *members: str) -> None:
    """Heartbeats of these, all of them accepted, until a snapshot has come before the first short lease was over."""

    async def offered() -> bool:
        for name in members:
            assert (await workers.beat(make_record(name))).status is LeaseStatus.RENEWED
        return await names(workers) == {f"{name}@1" for name in members}

    await until(offered)


async def test_heartbeat_between_descriptions_makes_few_commands(server, fleet):
    """It made 30, of which 8 read fields of `meta` and 7 asked for types of keys."""

    def commands() -> int:
        lines = server.command("INFO", "commandstats").splitlines()
        counts = {
            line.partition(":")[0]: int(line.partition("calls=")[2].partition(",")[0])
            for line in lines
            if "calls=" in line
        }
        return sum(count for name, count in counts.items() if name not in {"cmdstat_fcall", "cmdstat_info"})

    record = make_record("w1", Role.DECODE)
    for _ in range(2):
        fleet.generation = (await fleet.beat(record)).generation
    await fleet.cache(record, chain_of(range(64)))
    before = commands()
    for _ in range(20):
        reply = await fleet.beat(record, describe=False)
        assert (reply.status, reply.undescribed) == (LeaseStatus.RENEWED, False)
        assert reply.cursor > 0
    # The time of the last call is written from time to time, and a sweep may come in between.
    assert commands() - before <= 17 * 20 + 100


async def test_heartbeat_registers_everything_a_gateway_needs_to_know(fleet):
    record = make_record("w1", Role.DECODE, load=make_load(queue_tokens=7, sequences=3, transfer_rate=5e8))
    reply = await fleet.beat(record)
    assert reply.status is LeaseStatus.RENEWED
    assert reply.members == ("w1@1",)
    (seen,) = (await fleet.snapshot()).workers
    assert seen == record


async def test_heartbeat_returns_members_only_after_a_change(fleet):
    fleet.generation = (await fleet.beat(make_record("w1"))).generation
    assert (await fleet.beat(make_record("w1"))).members is None
    await fleet.beat(make_record("w2"))
    reply = await fleet.beat(make_record("w1"))
    assert (reply.joined, reply.left, reply.members) == (("w2@1",), (), None)
    fleet.generation = reply.generation
    await fleet.registry.deregister("w2@1")
    reply = await fleet.beat(make_record("w1"))
    assert (reply.joined, reply.left, reply.members) == ((), ("w2@1",), None)
    fleet.generation = 0
    assert set((await fleet.beat(make_record("w1"))).members) == {"w1@1"}


async def test_heartbeat_without_a_description_renews_the_rest(server, fleet):
    record = make_record("w1", Role.DECODE, links=(make_link(make_record("p"), 1e9),))
    await fleet.beat(record)
    kept = server.command("GET", f"{fleet.keys.prefix}links:w1@1")
    later = make_record("w1", Role.DECODE, load=make_load(sequences=60, max_sequences=60))
    reply = await fleet.beat(later, describe=False)
    assert (reply.status, reply.workers, reply.undescribed) == (LeaseStatus.RENEWED, 1, False)
    assert (await fleet.snapshot()).workers == (record,)
    assert server.command("GET", f"{fleet.keys.prefix}links:w1@1") == kept
    routed = await route(fleet)
    assert "decode_room" in {term.name for term in routed.terms if term.seconds > 0}, "its load is the new one"
    server.command("DEL", fleet.keys.worker("w1"))
    assert (await fleet.beat(later, describe=False)).undescribed
    assert not (await fleet.beat(record)).undescribed
    assert (await fleet.snapshot()).workers == (record,)


async def test_lease_ends_without_heartbeats(brief):
    await until_offered(brief, "w1")

    async def gone() -> bool:
        return await names(brief) == set()

    await until(gone)


async def test_lapsed_incarnation_may_renew_until_fenced(server):
    server.command("FLUSHALL")
    workers = Fleet(server, **BRIEF)
    await workers.beat(make_record("w1"))

    async def lapsed() -> bool:
        return await names(workers) == set()

    await until(lapsed)
    await until_offered(workers, "w1")
    await workers.close()


async def forgotten(workers: Fleet, incarnation: str) -> None:
    """Wait until the registry has no row of it, while another worker beats."""

    async def gone() -> bool:
        members = (await workers.beat(make_record("w2"))).members
        return members is not None and incarnation not in members

    await until(gone)


async def test_silent_incarnation_is_forgotten_and_may_register_again(server):
    """It did not reach Redis, which says nothing about its engine."""
    async with Fleet.of(server, **SHORT) as workers:
        await workers.beat(make_record("w1"))
        await workers.cache(make_record("w1"), chain_of(tuple(range(64))))
        await forgotten(workers, "w1@1")
        assert server.command("EXISTS", workers.keys.blocks("w1@1")) == ":0\r\n"
        reply = await workers.beat(make_record("w1"))
        assert (reply.status, reply.cursor) == (LeaseStatus.RENEWED, -1)
        assert "w1@1" in reply.members


async def test_incarnation_that_a_peer_found_dead_is_fenced(server):  # [zombie-fenced]
    async with Fleet.of(server, **SHORT) as workers:
        await workers.beat(make_record("zombie"))
        await forgotten(workers, "zombie@1")
        await workers.registry.fence("zombie@1", by="w2@1")
        reply = await workers.beat(make_record("zombie"))
        assert (reply.status, reply.by) == (LeaseStatus.FENCED, "w2@1")
        assert (await workers.snapshot(missing=["zombie@1", "w2@1"])).fenced == {"zombie@1"}
        assert (await workers.beat(make_record("zombie", number=2))).status is LeaseStatus.RENEWED


async def test_superseded_incarnation_is_fenced_for_good(server):
    """Also when the newer one has come and gone while the older one did not reach Redis."""
    async with Fleet.of(server, **SHORT) as workers:
        await workers.beat(make_record("w1", number=9))
        await workers.beat(make_record("w1", number=10))
        await forgotten(workers, "w1@10")
        reply = await workers.beat(make_record("w1", number=9))
        assert (reply.status, reply.by) == (LeaseStatus.FENCED, "w1@10")


async def test_redis_hang_fences_no_worker(server):  # [redis-bounded-wait]
    server.command("FLUSHALL")
    workers = Fleet(server, **SHORT)
    for name in ("w1", "w2"):
        await workers.beat(make_record(name))
    server.pause()
    await asyncio.sleep(SHORT["FENCE_AFTER_MS"] / 1000 + 0.4)
    server.resume()
    # The first heartbeat after the hang finds the other worker silent for longer than the fencing period.
    for name in ("w1", "w2", "w1"):
        assert (await workers.beat(make_record(name))).status is LeaseStatus.RENEWED
    await until_offered(workers, "w1", "w2")
    await workers.close()


async def test_newest_incarnation_wins_and_older_is_fenced(fleet):  # [newest-incarnation]
    old, new = make_record("w1", number=9), make_record("w1", number=10)
    await fleet.beat(old)
    await fleet.cache(old, chain_of(tuple(range(64))))
    assert (await fleet.beat(new)).members == ("w1@10",)
    reply = await fleet.beat(old)
    assert (reply.status, reply.by) == (LeaseStatus.FENCED, "w1@10")
    assert await names(fleet) == {"w1@10"}


async def test_older_incarnation_cannot_take_a_live_worker_id(fleet):
    await fleet.beat(make_record("w1", number=10**18 + 1))
    reply = await fleet.beat(make_record("w1", number=10**18))
    assert reply.status is LeaseStatus.FENCED


async def test_deregistering_is_final(fleet):
    await fleet.beat(make_record("w1"))
    await fleet.registry.deregister("w1@1")
    await fleet.registry.deregister("w1@1")
    assert await names(fleet) == set()
    assert (await fleet.beat(make_record("w1"))).status is LeaseStatus.FENCED


async def test_endings_are_reported_with_kills_for_memory(fleet):
    for name in ("w1", "w2", "w3"):
        await fleet.beat(make_record(name))
    await fleet.registry.deregister("w1@1", for_memory=True)
    await fleet.registry.deregister("w2@1")
    endings = await fleet.registry.endings(["w1@1", "w2@1", "w3@1"])
    assert endings == Endings(ended=frozenset({"w1@1", "w2@1"}), for_memory=frozenset({"w1@1"}))
    await fleet.beat(make_record("w1", number=2))
    assert (await fleet.registry.endings(["w1@1"])).for_memory == {"w1@1"}


async def test_draining_and_stalled_workers_are_seen_and_not_chosen(fleet):
    await fleet.beat(make_record("a", state=WorkerState.DRAINING))
    await fleet.beat(make_record("b", state=WorkerState.STALLED))
    assert await names(fleet) == {"a@1", "b@1"}
    assert await route(fleet) is None


async def route(workers: Fleet, prompt: tuple[int, ...] = tuple(range(10))):
    demand = Demand(prompt_tokens=len(prompt), output_tokens=1, local_prefill_tokens=16)
    chain = b"".join(chain_of(prompt))
    return await workers.index.route(
        model=MODEL, demand=demand, page_size=PAGE, chain=chain, exclude=frozenset(), seed=1
    )


async def test_clusters_do_not_see_each_other(server, fleet):
    other = Fleet(server, cluster="other")
    await fleet.beat(make_record("w1"))
    await other.beat(make_record("w2"))
    assert await names(fleet) == {"w1@1"}
    assert await names(other) == {"w2@1"}
    await other.close()


async def test_everything_written_has_a_time_to_live(server, fleet):
    await fleet.beat(make_record("w1"))
    await fleet.cache(make_record("w1"), chain_of(tuple(range(64))))
    await fleet.beat(make_record("w2"))
    await fleet.registry.deregister("w2@1")
    written = [line for line in server.command("KEYS", "*").split("\r\n") if line.startswith("tandem:")]
    assert len(written) == 13
    for key in written:
        assert int(server.command("PTTL", key).strip()[1:]) > 0, key


async def test_wiped_registry_has_a_new_epoch_and_fills_by_heartbeats(server, fleet):
    await fleet.beat(make_record("w1"))
    before = (await fleet.snapshot()).epoch
    server.wipe()
    empty = await fleet.snapshot()
    assert empty.workers == ()
    assert empty.epoch != before
    await fleet.beat(make_record("w1"))
    assert await names(fleet) == {"w1@1"}


async def test_redis_user_with_documented_acl_can_call_everything(server, fleet):
    grant([server], documented_rules(), user="tandem", password="secret")
    user = Fleet(server, user="tandem:secret")
    with every_call_noted() as calls:
        await every_call(user)
    assert functions_of(calls) == registered_functions()
    await user.close()
