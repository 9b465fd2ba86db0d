"""Connections of a gateway: few ahead, others on first use, and all to workers that Redis does not name."""

import asyncio
import time
from dataclasses import replace

import pytest

from tandem_engine.scheduler.loop import WAIT_SLICE
from tandem_services.gateway.dispatch import engine_pool
from tandem_services.gateway.dispatch.engine_client import PROOF_S, LivenessTiming, Revival
from tandem_services.gateway.dispatch.engine_pool import IDLE_S, EnginePool
from tandem_services.router.membership import PROOF_WAIT_S
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.service_clock import ServiceClock
from tandem_testing.waiting import until

PATIENCE_S = 60.0


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def dead():
    return []


@pytest.fixture
async def pool(rack, clock, dead, monkeypatch):
    monkeypatch.setattr(engine_pool, "AHEAD", 2)
    revival = Revival(context=rack.context, clock=clock, on_alive=lambda _: None)
    timing = LivenessTiming(ping_interval_s=0.02, unanswered_pings=400)
    pool = EnginePool(context=rack.context, timing=timing, on_dead=dead.append, revival=revival, clock=clock)
    yield pool
    pool.close()


@pytest.fixture
def views(rack):
    return [rack.add(f"w{n}", MockBehavior(token=hash_tokens(3, 250))).view for n in range(6)]


def names(views) -> set[str]:
    return {view.incarnation for view in views}


async def outlive_proofs(clock) -> None:
    """No worker is pinged any more, and answers to the last pings are old."""
    clock.advance(2 * PROOF_S)
    await asyncio.sleep(0.2)
    clock.advance(2 * PROOF_S)


def block_until_answered(engine, pings: int) -> None:
    """As a long callback blocks an event loop. `pings` that the engine has had before."""
    assert engine.wait_until(lambda: engine.pings > pings)
    time.sleep(0.3)


async def proven(pool, count: int) -> set[str]:
    all_workers = {f"w{n}@1" for n in range(6)}
    await until(lambda: sum(map(pool.proven, all_workers)) >= count, PATIENCE_S, f"{count} have answered")
    return {name for name in all_workers if pool.proven(name)}


async def test_few_workers_of_a_large_fleet_are_connected_ahead(pool, rack, views):
    pool.watch(views)
    first = await proven(pool, 2)
    assert pool.silent == frozenset()
    for _ in range(5):
        pool.watch(views)
    assert await proven(pool, 2) == first, "the same ones"
    pinged = {engine.view.incarnation for engine in rack.engines if engine.pings}
    assert pinged == first


async def test_all_workers_of_a_small_fleet_are_connected_ahead(pool, views):
    pool.watch(views[:2])
    assert pool.silent == names(views[:2]), "until they have answered"
    assert await proven(pool, 2) == names(views[:2])


async def test_worker_that_leaves_is_replaced_by_another(pool, views):
    pool.watch(views[:2])
    await proven(pool, 2)
    pool.watch(views[1:])
    assert len(await proven(pool, 2)) == 2
    assert not pool.proven(views[0].incarnation)


async def test_other_worker_is_connected_when_a_request_needs_it(pool, views):
    pool.watch(views)
    ahead = await proven(pool, 2)
    other = next(view for view in views if view.incarnation not in ahead)
    assert await pool.prove(other, within_s=PATIENCE_S)
    assert pool.proven(other.incarnation)


async def test_crowd_for_an_unknown_worker_waits_for_one_answer(pool, views):
    asked = [asyncio.create_task(pool.prove(views[0], within_s=PATIENCE_S)) for _ in range(20)]
    await asyncio.sleep(0)
    assert pool.silent == frozenset(), "a prompt that comes now may choose it, too"
    assert all(await asyncio.gather(*asked))


async def test_address_without_an_engine_proves_nothing(pool, views):
    silent = replace(views[0], request_endpoint="tcp://127.0.0.1:1")
    assert not await pool.prove(silent, within_s=PATIENCE_S)
    assert not pool.proven(silent.incarnation)


async def test_worker_whose_proof_is_outdated_is_pinged_again(pool, rack, views, clock):
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    await outlive_proofs(clock)
    engine = rack.engines[0]
    before = engine.pings
    await asyncio.sleep(0.2)
    assert engine.pings == before, "an unused worker is not pinged"
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    assert engine.pings > before


async def test_engine_that_hangs_is_silent_until_it_answers(pool, rack, views, clock):
    name = views[0].incarnation
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    await outlive_proofs(clock)
    rack.engines[0].behavior.deaf = True
    assert not await pool.prove(views[0], within_s=0.2)
    assert pool.silent == {name}
    rack.engines[0].behavior.deaf = False
    await until(lambda: pool.proven(name), PATIENCE_S, "it has answered")
    assert pool.silent == frozenset()


async def test_worker_that_vanished_while_unused_gets_nothing(pool, rack, views, clock):
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    await outlive_proofs(clock)
    await asyncio.to_thread(rack.engines[0].stop)
    assert not await pool.prove(views[0], within_s=PATIENCE_S)


async def test_unlisted_workers_are_all_connected(pool, views):
    pool.watch(views)
    await proven(pool, 2)
    pool.watch(views, unlisted=frozenset(names(views)))
    assert pool.silent == frozenset(), "they are members until they do not answer"
    assert await proven(pool, 6) == names(views)


async def test_unused_connection_is_closed_after_a_while(pool, views, clock):
    pool.watch(views)
    ahead = await proven(pool, 2)
    for view in views:
        assert await pool.prove(view, within_s=PATIENCE_S)
    clock.advance(IDLE_S - 1)
    pool.watch(views)
    assert await proven(pool, 6) == names(views)
    clock.advance(2)
    pool.watch(views)
    assert await proven(pool, 2) == ahead


async def test_connections_unused_the_longest_are_closed_first(pool, views, clock, monkeypatch):
    for view in views:
        assert await pool.prove(view, within_s=PATIENCE_S)
        clock.advance(1)
    monkeypatch.setattr(engine_pool, "AHEAD", 0)
    monkeypatch.setattr(engine_pool, "MAX_OPEN", 3)
    pool.watch(views)
    assert {view.incarnation for view in views[3:]} <= await proven(pool, 3)


async def test_answer_during_a_blocked_event_loop_counts(pool, views, clock, rack):
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    await outlive_proofs(clock)
    pings = rack.engines[0].pings
    asked = asyncio.create_task(pool.prove(views[0], within_s=0.05))
    await asyncio.sleep(0)
    block_until_answered(rack.engines[0], pings)
    assert await asked


async def test_connections_stay_bounded_while_there_is_no_new_view(pool, views, clock, monkeypatch):
    monkeypatch.setattr(engine_pool, "MAX_OPEN", 3)
    for view in views:
        assert await pool.prove(view, within_s=PATIENCE_S)
        clock.advance(1)
    assert await proven(pool, 3) == names(views[3:])


def test_proof_outwaits_an_engine_in_a_long_step():
    assert PROOF_WAIT_S >= 2 * WAIT_SLICE


async def test_worker_watched_again_is_connected_alone(pool, views, monkeypatch):
    pool.watch(views[1:3])
    assert await proven(pool, 2) == names(views[1:3])
    pool.watch_again(views[0], unlisted=False)
    pool.revived(views[0].incarnation)
    assert not pool.proven_now(views[0].incarnation), "two are connected ahead, and that is enough"
    monkeypatch.setattr(engine_pool, "AHEAD", 3)
    pool.watch_again(views[0], unlisted=False)
    pool.watch_again(views[3], unlisted=True)
    assert await proven(pool, 4) == names(views[:4])


async def test_worker_that_was_asked_lately_is_proven_now(pool, views, clock):
    name = views[0].incarnation
    assert not pool.proven_now(name)
    assert await pool.prove(views[0], within_s=PATIENCE_S)
    assert pool.proven_now(name)
    await outlive_proofs(clock)
    assert not pool.proven_now(name)
