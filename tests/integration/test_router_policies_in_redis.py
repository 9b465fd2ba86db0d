"""Policies narrow what Redis chooses among; reservation, price and fallback stay."""

from collections import Counter

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import RouteQuery, Source
from tandem_services.router.policies import PolicyNames
from tandem_services.router.router import Router
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, chain_of, make_record, patient_router

PROMPT = tuple(range(20 * PAGE))
QUERY = RouteQuery(request_id="r", model=MODEL, token_ids=PROMPT, max_tokens=16)


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, **LASTING) as workers:
        for name in ("p1", "p2"):
            await workers.beat(make_record(name, Role.PREFILL))
        for name in ("d1", "d2"):
            await workers.beat(make_record(name, Role.DECODE))
        yield workers


@pytest.fixture
async def router_with(server):
    routers = []

    async def make(policies: str) -> Router:
        routers.append(patient_router(server, policies=PolicyNames.parse(policies)))
        await routers[-1].start()
        return routers[-1]

    yield make
    for router in routers:
        await router.stop()


async def test_round_robin_alternates_regardless_of_cached_prefixes(fleet, router_with):
    await fleet.cache(make_record("p1", Role.PREFILL), chain_of(PROMPT))
    router = await router_with("round_robin")
    choices = [await router.choose(QUERY) for _ in range(4)]
    assert [choice.decode.worker_id for choice in choices] == ["d1", "d2", "d1", "d2"]
    assert [choice.prefill.worker_id for choice in choices if choice.prefill] == ["p1", "p2", "p1", "p2"]
    assert all(choice.source is Source.REDIS and choice.reservation.bucket is not None for choice in choices)
    assert [choice.matched_tokens for choice in choices[:2]] == [len(PROMPT), 0]


async def test_roles_have_policies_of_their_own(fleet, router_with):
    await fleet.cache(make_record("p1", Role.PREFILL), chain_of(PROMPT))
    router = await router_with("prefill=locality,decode=round_robin")
    choices = [await router.choose(QUERY) for _ in range(4)]
    assert Counter(choice.decode.worker_id for choice in choices) == {"d1": 2, "d2": 2}
    assert {choice.prefill.worker_id for choice in choices if choice.prefill} == {"p1"}


async def test_least_loaded_counts_open_reservations(fleet, router_with):
    router = await router_with("least_loaded")
    first = await router.choose(QUERY)
    second = await router.choose(QUERY)
    assert second.decode.worker_id != first.decode.worker_id
    assert second.prefill is not None
    assert first.prefill is not None
    assert second.prefill.worker_id != first.prefill.worker_id
    await router.release(first)
    assert (await router.choose(QUERY)).decode.worker_id == first.decode.worker_id


async def test_round_robin_skips_workers_that_failed_the_request(fleet, router_with):
    router = await router_with("round_robin")
    query = RouteQuery(request_id="r", model=MODEL, token_ids=PROMPT, exclude=frozenset({"d1@1"}))
    assert {(await router.choose(query)).decode.worker_id for _ in range(3)} == {"d2"}


async def test_policy_holds_without_redis(fleet, router_with, server):
    router = await router_with("round_robin")
    server.pause()
    try:
        router._routing.timeout_s = 0.01  # The deadline of the tests is far longer than a pause should be.
        choices = [await router.choose(QUERY) for _ in range(4)]
    finally:
        server.resume()
    assert {choice.source for choice in choices} == {Source.LOCAL}
    assert [choice.decode.worker_id for choice in choices] == ["d1", "d2", "d1", "d2"]


def rows_read(server) -> int:
    lines = server.command("INFO", "commandstats").splitlines()
    counts = [line.partition("calls=")[2].partition(",")[0] for line in lines if line.startswith("cmdstat_hget:")]
    return int(counts[0]) if counts else 0


async def test_policy_that_leaves_one_worker_reads_no_others(server, router_with):
    async with Fleet.of(server, **LASTING) as workers:
        for number in range(40):
            await workers.beat(make_record(f"w{number}"))
        router = await router_with("session")
        first = await router.choose(QUERY)
        await router.release(first)
        before = rows_read(server)
        again = await router.choose(QUERY)
        assert again.decode == first.decode
        assert rows_read(server) - before < 8
