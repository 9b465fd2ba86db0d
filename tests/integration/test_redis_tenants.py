"""Limits and counters of tenants in a real Redis: exact over gateways, equal to those in Python, and optional."""

import asyncio
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.base.clock import MonotonicClock
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.gateway.access.tenants import AccessMetrics, Tenant, TenantLimits
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.shared_state import Charge, FairBoard, QueueHead, RemoteHead, Report, Standing, UsageBoard
from tandem_services.router.usage_counters import Ask, Refused, UsageLimits, UsageWindows
from tandem_testing.router_builders import PATIENT_S, Fleet
from tandem_testing.waiting import until

KEYS = Keys("default")
LASTING = {"QUEUE_HEAD_TTL_MS": 600_000, "YIELDED_SLOT_TTL_MS": 600_000, "BACKLOG_MS": 600_000}
"""What gateways say counts for longer than any machine takes for the calls of a test."""


@pytest.fixture
async def library(server):
    server.wipe()
    client = RedisClient(RedisAddress(url=server.url), timeout_s=PATIENT_S)
    yield FunctionLibrary(client)
    await client.close()


@pytest.fixture
def usage(library) -> UsageBoard:
    return UsageBoard(library=library, keys=KEYS)


@pytest.fixture
async def fair(server):
    async with Fleet.of(server, **LASTING) as fleet:
        yield FairBoard(library=fleet.index.library, keys=KEYS)


# Limits


async def test_many_gateways_together_grant_exactly_the_limit(server, library):
    clients = [RedisClient(RedisAddress(url=server.url), timeout_s=PATIENT_S) for _ in range(4)]
    boards = [UsageBoard(library=FunctionLibrary(client), keys=KEYS) for client in clients]
    limits = UsageLimits(requests=50, tokens=100_000)
    asks = [boards[n % 4].take("t", limits, Ask(requests=1, tokens=10)) for n in range(200)]
    usages = await asyncio.gather(*asks)
    assert sum(usage.refused is Refused.NOTHING for usage in usages) == 50
    refused = next(usage for usage in usages if usage.refused is Refused.REQUESTS)
    assert refused.requests == 50
    assert refused.retry_s is not None
    assert 0 < refused.retry_s <= 61
    assert (await boards[0].take("other", limits, Ask(requests=1))).refused is Refused.NOTHING
    await asyncio.gather(*(client.close() for client in clients))


async def test_taken_tokens_are_corrected_to_actual_count(usage):
    limits = UsageLimits(tokens=100)
    taken = await usage.take("t", limits, Ask(tokens=90))
    assert (await usage.take("t", limits, Ask(tokens=20))).refused is Refused.TOKENS
    await usage.settle("t", second=taken.second, tokens=-60, lease="")
    assert (await usage.take("t", limits, Ask(tokens=20))).tokens == 50
    await usage.settle("t", second=taken.second, tokens=200, lease="")
    late = await usage.take("t", limits, Ask(tokens=1))
    assert (late.refused, late.tokens) == (Refused.TOKENS, 250)
    assert (await usage.take("t", limits, Ask(tokens=101))).retry_s is None


async def test_late_settlement_of_an_old_second_gives_no_tokens_back(usage):
    limits = UsageLimits(tokens=100)
    taken = await usage.take("t", limits, Ask(tokens=100))
    await usage.settle("t", second=taken.second - 500, tokens=-100, lease="")
    assert (await usage.take("t", limits, Ask(tokens=1))).refused is Refused.TOKENS


async def test_lease_ends_with_its_request_or_by_itself(server, usage):
    board, limits = usage, UsageLimits(concurrency=2)
    for name in ("a", "b"):
        assert (await board.take("t", limits, Ask(lease=name))).refused is Refused.NOTHING
    assert (await board.take("t", limits, Ask(lease="c"))).refused is Refused.CONCURRENCY
    await board.settle("t", second=0, tokens=0, lease="a")
    await board.renew("t", ["a", "b"])
    assert (await board.take("t", limits, Ask(lease="c"))).refused is Refused.NOTHING
    # A gateway died: its leases run out.
    for name in ("b", "c"):
        server.command("ZADD", KEYS.usage_of("t")[1], "1", name)
    assert (await board.take("t", limits, Ask(lease="d"))).refused is Refused.NOTHING


@pytest.mark.parametrize("seed", range(3))
async def test_lua_and_python_make_equal_decisions(usage, seed):
    """Within one second of Redis, so that both have the same windows."""
    random, windows = Random(seed), UsageWindows()
    limits = UsageLimits(requests=12, tokens=300, concurrency=4)
    first = (await usage.take("t", UsageLimits(), Ask())).second
    running: list[str] = []
    for step in range(60):
        ask = Ask(requests=1, tokens=random.randrange(60), lease=f"r{step}" if random.random() < 0.7 else "")
        theirs = await usage.take("t", limits, ask)
        if theirs.second != first:
            pytest.skip("a second has passed")
        ours = windows.take(limits, ask, float(first))
        assert (theirs.refused, theirs.requests, theirs.tokens) == (ours.refused, ours.requests, ours.tokens)
        if ours.refused is Refused.NOTHING and ask.lease:
            running.append(ask.lease)
        if running and random.random() < 0.3:
            lease = running.pop(0)
            tokens = random.randrange(-20, 20)
            await usage.settle("t", second=first, tokens=tokens, lease=lease)
            windows.settle(first, tokens, float(first))
            windows.end(lease)


async def test_malformed_tenant_usage_is_dropped_and_keys_expire(server, usage):  # [redis-values-untrusted]
    usage_key, running_key = KEYS.usage_of("t")
    server.command("SET", usage_key, "text")
    server.command("SET", running_key, "text")
    limits = UsageLimits(requests=2, tokens=9, concurrency=2)
    assert (await usage.take("t", limits, Ask(requests=1, lease="a"))).requests == 1
    server.command("HSET", usage_key, "r99999999999", "5", "x", "5", "tnan", "nan", "r1", "7", "t", "q")
    taken = await usage.take("t", limits, Ask(requests=1, lease="b"))
    assert (taken.refused, taken.requests) == (Refused.NOTHING, 2)
    assert server.command("HLEN", usage_key).strip() in (":1", ":2")
    for key in (usage_key, running_key):
        assert int(server.command("PTTL", key).strip()[1:]) > 0


async def test_tenant_limits_hold_during_redis_hang_and_recovery(server):  # [redis-is-optional] [redis-bounded-wait]
    server.wipe()
    client = RedisClient(RedisAddress(url=server.url), timeout_s=0.5)
    metrics = AccessMetrics(CollectorRegistry())
    board = UsageBoard(library=FunctionLibrary(client), keys=KEYS)
    limits = TenantLimits(clock=MonotonicClock(), metrics=metrics, board=board)
    tenant = Tenant(name="t", sha256=(), requests_per_minute=6)
    try:
        await client.require(wait_s=PATIENT_S)

        async def taken(count: int) -> list[bool]:
            asks = [await limits.take(tenant, Ask(requests=1)) for _ in range(count)]
            return [ask.usage.refused is Refused.NOTHING for ask in asks]

        assert await taken(4) == [True] * 4
        server.pause()
        # What Redis granted counts here too.
        assert await taken(4) == [True, True, False, False]
        server.resume()
        await client.require(wait_s=PATIENT_S)

        async def shared() -> bool:
            return (await limits.take(tenant, Ask(requests=1))).shared

        await until(shared, PATIENT_S, "Redis counts again")
    finally:
        server.resume()
        await client.close()


# Fairness


async def report(fair: FairBoard, gateway: str = "one", **rest) -> Standing:
    """A gateway where `a` waits."""
    return await fair.sync(Report(gateway=gateway, charges=[Charge(tenant="a", cost=0, waits=True)], **rest))


async def sync(fair: FairBoard, **charges: tuple[float, bool]) -> dict[str, float]:
    reported = [Charge(tenant=name, cost=cost, waits=waits) for name, (cost, waits) in charges.items()]
    return (await fair.sync(Report(gateway="one", charges=reported))).values


async def test_gateways_add_to_the_same_counters(fair):
    assert await sync(fair, a=(100, True)) == {"a": 100}
    assert await sync(fair, a=(50.25, True)) == {"a": 150.25}


async def test_returning_tenant_in_redis_starts_at_min_counter(fair):
    await sync(fair, a=(1000, True))
    assert await sync(fair, b=(0, True)) == {"b": 1000}
    assert await sync(fair, b=(10, True)) == {"b": 1010}


async def test_tenant_without_competition_accrues_no_debt(fair):
    await sync(fair, a=(1000, True))
    standing = await fair.sync(Report(gateway="one", charges=[Charge(tenant="a", cost=0, waits=False)]))
    assert standing.floor == 1000
    assert await sync(fair, b=(0, True)) == {"b": 1000}
    assert await sync(fair, a=(0, True)) == {"a": 1000}


async def test_counters_of_idle_tenants_are_dropped(fair, server):
    for number in range(200):
        await sync(fair, **{f"t{number}": (5, True)})
        await sync(fair, **{f"t{number}": (0, False)})
    assert int(server.command("HLEN", KEYS.fairness[0]).strip()[1:]) <= 2
    assert int(server.command("ZCARD", KEYS.fairness[1]).strip()[1:]) == 0
    assert int(server.command("PTTL", KEYS.fairness[0]).strip()[1:]) > 0


async def test_malformed_tenant_counters_are_dropped(fair, server):  # [redis-values-untrusted]
    counters, backlog, heads, places = KEYS.fairness
    server.command("SET", counters, "text")
    server.command("SET", backlog, "text")
    server.command("SET", heads, "text")
    server.command("HSET", places, "no", "text")
    assert await sync(fair, a=(5, True)) == {"a": 5}
    server.command("HSET", counters, "a", "not a number")
    assert await sync(fair, a=(5, True)) == {"a": 5}
    for number in range(5000):
        if number % 500 == 0:
            server.command("HSET", counters, *(word for n in range(500) for word in (f"x{number + n}", "1")))
    assert await sync(fair, a=(5, True)) == {"a": 5}
    server.command("HSET", heads, "two", "not a head", "three", "99999999999999 0 a", "four", "1 0 a")
    in_time = int(server.command("TIME").split()[2]) * 1000 + LASTING["QUEUE_HEAD_TTL_MS"] // 2
    server.command("HSET", heads, "five", f"{in_time} {'9' * 21} a")
    for text in ("many", "99999999999999 7", "-1", "1 7"):
        server.command("SET", places, text)
        standing = await report(fair, wanted=3)
        assert (standing.heads, standing.places) == ((), 0)


async def test_gateways_receive_queue_heads_of_others_only(fair):
    await sync(fair, a=(0, True), b=(70, True))
    assert (await report(fair, "one", head=QueueHead(priority=0, tenant="a"))).heads == ()
    received = await report(fair, "two", head=QueueHead(priority=-3, tenant="b"))
    assert received.heads == (RemoteHead(priority=0, value=0.0),)
    assert (await report(fair, "one")).heads == (RemoteHead(priority=-3, value=70.0),)
    # "one" has no queue head any more.
    assert (await report(fair, "two")).heads == ()


@pytest.mark.parametrize("priority", [2**63 - 1, -(2**63), 2**53 + 1])
async def test_reported_queue_head_keeps_exact_priority(fair, priority):
    """As a number it lost its unit, or could not be read at all."""
    await report(fair, "one", head=QueueHead(priority=priority, tenant="a"))
    assert (await report(fair, "two")).heads == (RemoteHead(priority=priority, value=0.0),)


async def test_place_that_one_gateway_gives_up_is_granted_to_one_other(fair):
    assert (await report(fair, "one", left=3)).places == 0
    assert (await report(fair, "two", wanted=2)).places == 2
    assert (await report(fair, "three", wanted=2)).places == 1
    assert (await report(fair, "two", wanted=2)).places == 0


async def test_old_queue_heads_and_offers_expire(server):
    async with Fleet.of(server, QUEUE_HEAD_TTL_MS=0, YIELDED_SLOT_TTL_MS=0) as fleet:
        fair = FairBoard(library=fleet.index.library, keys=KEYS)
        await report(fair, "one", head=QueueHead(priority=0, tenant="a"), left=5)
        standing = await report(fair, "two", wanted=5)
    assert (standing.heads, standing.places) == ((), 0)


async def test_empty_tenant_name_does_not_raise_the_counter_floor(fair):
    """Its name is empty. It stood nowhere, so that it was always ahead of itself at other gateways."""
    charges = [Charge(tenant="", cost=100, waits=True)]
    queue_head = QueueHead(priority=0, tenant="")
    for sofar in (100, 200):
        standing = await fair.sync(Report(gateway="one", charges=charges, head=queue_head))
        assert (standing.values, standing.floor) == ({"": sofar}, 0)
    reported = await fair.sync(Report(gateway="two", charges=charges))
    assert (reported.values, reported.heads) == ({"": 300}, (RemoteHead(priority=0, value=300),))
