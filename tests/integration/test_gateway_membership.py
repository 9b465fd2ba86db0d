"""Workers that a gateway routes to: those that answer it, whatever a real Redis has of them."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisAddress
from tandem_services.gateway.dispatch import engine_pool
from tandem_services.router.decision import RouteQuery
from tandem_services.router.deployment import Deployment
from tandem_services.router.policies import PolicyNames
from tandem_services.router.registry import LeaseStatus
from tandem_services.router.router import Router, RouterConfig
from tandem_testing.gateway_builders import EngineRack, config_of, fleet_of, serving_fleets
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.router_builders import PATIENT_S, Fleet, make_load, make_record
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until

OURS, THEIRS = KeyPair.generate(), KeyPair.generate()
PATIENCE_S = 60.0
BRIEF = {"LEASE_MS": 400, "FENCE_AFTER_MS": 800, "SWEEP_EVERY_MS": 0}
"""A worker that is silent for a second is gone from the registry."""


def behavior() -> MockBehavior:
    return MockBehavior(token=hash_tokens(3, 250))


@pytest.fixture
def rack():
    with EngineRack(context=IpcContext(OURS)) as engines:
        yield engines


@pytest.fixture
def foreign_rack():
    with EngineRack(context=IpcContext(THEIRS)) as engines:
        yield engines


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, deployment=Deployment.of(OURS), **BRIEF) as workers:
        yield workers


def record_of(engine: MockEngine, **changes):
    record = make_record("any", load=make_load())
    return replace(record, view=replace(engine.view, model="m", **changes))


@asynccontextmanager
async def beating(fleet: Fleet, *engines: MockEngine):
    """Heartbeats of the workers of these engines until the block ends."""

    async def beat() -> None:
        while True:
            for engine in engines:
                assert (await fleet.beat(record_of(engine))).status is LeaseStatus.RENEWED
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def gateway_of(server, context: IpcContext, folder, policies: PolicyNames | None = None, **config):
    """A gateway of the deployment that `context` has the keys of: its client and its router."""
    deployment = Deployment.of(context.keys)
    settings = RouterConfig(
        redis=RedisAddress(url=server.url),
        deployment=deployment,
        policies=policies or PolicyNames(),
        routing_timeout_s=PATIENT_S,
        background_timeout_s=PATIENT_S,
    )
    router = Router(settings)
    tokenizer = TextTokenizer.load(write_tokenizer(folder))
    settings = config_of(**{"names": ("m",), "ping_interval_s": 0.1, "unanswered_pings": 400, **config})
    parts = fleet_of(settings, router, router.sessions, context, tokenizer)
    async with serving_fleets(settings, [parts]) as http:
        await router.start()
        try:
            yield http, router
        finally:
            await router.stop()


async def answered(http, count: int = 4) -> list[int]:
    body = {"model": "m", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}
    return [(await http.post("/v1/completions", json=body)).status_code for _ in range(count)]


def sees(router: Router, *incarnations: str) -> Callable[[], bool]:
    return lambda: {worker.incarnation for worker in router.workers()} == set(incarnations)


async def test_workers_without_redis_stay_members_while_reachable(server, rack, fleet, tmp_path):
    """The gateway keeps Redis, which forgets them, and a restart of the heartbeats brings them back."""
    engines = [rack.add(name, behavior()) for name in ("a", "b")]
    async with gateway_of(server, rack.context, tmp_path) as (http, router):
        async with beating(fleet, *engines):
            await until(sees(router, "a@1", "b@1"), PATIENCE_S, "both are members")
        await until(lambda: router._membership.unlisted == {"a@1", "b@1"}, PATIENCE_S, "Redis has lost both")
        async with Fleet.of(server, deployment=Deployment.of(OURS), **BRIEF) as empty:
            assert (await empty.snapshot()).workers == ()
            assert set(await answered(http, 20)) == {200}
            assert sees(router, "a@1", "b@1")()
        async with beating(fleet, *engines):
            await until(lambda: not router._membership.unlisted, PATIENCE_S, "Redis has both again")
            assert set(await answered(http)) == {200}


async def test_workers_never_asked_stay_members_without_redis(server, rack, fleet, tmp_path, monkeypatch):
    """The gateway of a large fleet is connected to few of its workers. When Redis forgets all, it asks the others."""
    monkeypatch.setattr(engine_pool, "AHEAD", 1)
    engines = [rack.add(name, behavior()) for name in "abcd"]
    all_workers = {engine.view.incarnation for engine in engines}
    async with gateway_of(server, rack.context, tmp_path) as (http, router):
        async with beating(fleet, *engines):
            await until(sees(router, *all_workers), PATIENCE_S, "all are members")
            assert sum(engine.pings > 0 for engine in engines) <= 1
        await until(lambda: router._membership.unlisted == all_workers, PATIENCE_S, "Redis has lost them")
        await until(lambda: all(engine.pings > 0 for engine in engines), PATIENCE_S, "all were asked")
        await until(lambda: all(map(router._membership.proofs.proven, all_workers)), PATIENCE_S, "all have answered")
        await asyncio.to_thread(engines[0].stop)
        await until(sees(router, "b@1", "c@1", "d@1"), PATIENCE_S, "one answers no longer")
        assert set(await answered(http, 20)) == {200}


@pytest.mark.parametrize("endpoint", ["of another worker", "tcp://127.0.0.1:9"])
async def test_row_of_no_engine_costs_no_request(server, rack, fleet, tmp_path, monkeypatch, endpoint):
    """No worker was probed before: requests find out."""
    monkeypatch.setattr(engine_pool, "AHEAD", 0)
    engine = rack.add("a", behavior())
    changes = {} if endpoint == "of another worker" else {"request_endpoint": endpoint}
    old = record_of(engine, worker_id="z", incarnation="z@7", **changes)
    async with gateway_of(server, rack.context, tmp_path) as (http, router), beating(fleet, engine):
        await fleet.beat(old)
        await router.refresh()
        assert sees(router, "a@1", "z@7")()
        for _ in range(4):
            await fleet.beat(old)
            assert set(await answered(http)) == {200}
        assert sees(router, "a@1")()


async def test_policy_whose_worker_does_not_answer_chooses_another(server, rack, fleet, tmp_path, monkeypatch):
    """A policy leaves one worker of a role, so that neither Redis nor the view has another for the same query."""
    monkeypatch.setattr(engine_pool, "AHEAD", 0)
    engine = rack.add("b", behavior())
    old = record_of(engine, worker_id="a", incarnation="a@7", request_endpoint="tcp://127.0.0.1:9")
    in_turn = PolicyNames.parse("round_robin")
    async with gateway_of(server, rack.context, tmp_path, in_turn) as (http, router), beating(fleet, engine):
        await fleet.beat(old)
        await router.refresh()
        assert await answered(http, 1) == [200]
        assert "a@7" in router._membership.unusable, "it was asked first"
        assert router.counters.none == 0


async def test_session_stays_with_a_worker_in_a_long_step(server, rack, fleet, tmp_path, monkeypatch):
    """No other worker has the session."""
    monkeypatch.setattr(engine_pool, "AHEAD", 0)
    engine = rack.add("a", behavior())
    async with gateway_of(server, rack.context, tmp_path) as (_, router), beating(fleet, engine):
        await until(sees(router, "a@1"), PATIENCE_S, "it is a member")
        engine.behavior.deaf = True
        query = RouteQuery(request_id="r", model="m", token_ids=(1, 2, 3))
        choosing = asyncio.create_task(router.stay(query, "a@1"))
        await asyncio.sleep(0.5)
        engine.behavior.deaf = False
        choice = await choosing
        assert choice.decode.incarnation == "a@1"
        await router.release(choice)


async def test_prefill_worker_that_loses_redis_still_computes(server, rack, fleet, tmp_path):
    """Decode workers are registered, so that Redis finds a way without it."""
    prefill, decode = rack.add("p", behavior(), Role.PREFILL), rack.add("d", behavior(), Role.DECODE)
    async with (
        gateway_of(server, rack.context, tmp_path, prefill_fallback=False) as (http, router),
        beating(fleet, decode),
    ):
        async with beating(fleet, prefill):
            await until(sees(router, "p@1", "d@1"), PATIENCE_S, "both are members")
        await until(lambda: router._membership.unlisted == {"p@1"}, PATIENCE_S, "Redis has lost it")
        assert set(await answered(http, 10)) == {200}


async def test_ended_worker_is_removed_from_members(server, rack, fleet, tmp_path):
    engines = [rack.add(name, behavior()) for name in ("a", "b")]
    async with gateway_of(server, rack.context, tmp_path) as (_, router):
        async with beating(fleet, *engines):
            await until(sees(router, "a@1", "b@1"), PATIENCE_S, "both are members")
        await until(lambda: bool(router._membership.unlisted), PATIENCE_S, "Redis has lost them")
        await asyncio.to_thread(engines[0].stop)
        await until(sees(router, "b@1"), PATIENCE_S, "it answers no longer")


@pytest.mark.parametrize("reason", ["superseded", "fenced"])
async def test_superseded_or_dead_worker_is_removed_although_it_answers(server, rack, fleet, tmp_path, reason):
    """Its id was given to another incarnation, or its peers found it dead, while it did not reach Redis."""
    engine = rack.add("a", behavior())
    async with gateway_of(server, rack.context, tmp_path) as (_, router):
        async with beating(fleet, engine):
            await until(sees(router, "a@1"), PATIENCE_S, "it is a member")
        await until(lambda: bool(router._membership.unlisted), PATIENCE_S, "Redis has lost it")
        if reason == "superseded":
            newer = record_of(engine, incarnation="a@2", request_endpoint="tcp://127.0.0.1:9")
        else:
            newer = record_of(engine, worker_id="b", incarnation="b@1", request_endpoint="tcp://127.0.0.1:9")
            await fleet.registry.fence("a@1", by="b@1")

        async def gone() -> bool:
            await fleet.beat(newer)
            return sees(router)()

        await until(gone, PATIENCE_S, "it is no member")


async def test_forged_verdict_ends_no_member(server, rack, fleet, tmp_path):
    engine, forger = rack.add("a", behavior()), Deployment.of(THEIRS)
    async with gateway_of(server, rack.context, tmp_path) as (http, router):
        async with beating(fleet, engine):
            await until(sees(router, "a@1"), PATIENCE_S, "it is a member")
        await until(lambda: bool(router._membership.unlisted), PATIENCE_S, "Redis has lost it")
        server.command("SET", fleet.keys.fenced("a@1"), forger.verdict("a@1", by="b@1"))
        for _ in range(3):
            await router.refresh()
        assert sees(router, "a@1")()
        assert set(await answered(http)) == {200}


async def test_row_that_no_engine_answers_for_is_never_offered(server, rack, fleet, tmp_path):
    """An old row, written again: its proof is good, and another incarnation is at its address."""
    engine = rack.add("a", behavior())
    async with gateway_of(server, rack.context, tmp_path) as (http, router), beating(fleet, engine):
        await until(sees(router, "a@1"), PATIENCE_S, "it is a member")
        old = record_of(engine, worker_id="z", incarnation="z@7")
        for _ in range(6):
            await fleet.beat(old)
            await router.refresh()
            assert set(await answered(http)) == {200}
            assert "z@7" not in {worker.incarnation for worker in router.workers()}


async def test_engine_of_another_deployment_is_never_offered(server, rack, foreign_rack, fleet, tmp_path):
    """The row is signed by our deployment, and the engine behind it has other keys."""
    ours, theirs = rack.add("a", behavior()), foreign_rack.add("x", behavior())
    async with gateway_of(server, rack.context, tmp_path) as (http, router), beating(fleet, ours, theirs):
        await until(sees(router, "a@1"), PATIENCE_S, "ours is a member")
        for _ in range(6):
            await router.refresh()
            assert set(await answered(http)) == {200}
            assert sees(router, "a@1")()
    assert not theirs.received


async def test_victim_of_a_stolen_name_serves_on(server, rack, foreign_rack, fleet, tmp_path):
    """After a wipe a second deployment with the same cluster name registers first."""
    ours, theirs = rack.add("a", behavior()), foreign_rack.add("a", behavior())
    intruder = Fleet(server, deployment=Deployment.of(THEIRS), **BRIEF)
    async with gateway_of(server, rack.context, tmp_path) as (http, router), beating(fleet, ours):
        await until(sees(router, "a@1"), PATIENCE_S, "ours is a member")
        server.wipe()
        async with beating(intruder, theirs):
            for _ in range(6):
                await router.refresh()
                assert set(await answered(http)) == {200}
                assert sees(router, "a@1")()
                assert (await http.get("/ready")).status_code == 200
    assert not theirs.received
    await intruder.close()
