"""A cluster of Redis servers, whose slots move and whose nodes die: all keys of a client are in one slot."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import pytest_asyncio
from redis.crc import key_slot

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress, RedisClient, RedisUnavailableError
from tandem_services.router.decision import Source
from tandem_services.router.keys import Keys
from tandem_services.router.registry import LeaseStatus
from tandem_services.router.router import Router
from tandem_services.router.shared_state import SessionBinding, SessionBindings, SessionName
from tandem_testing.redis_calls import (
    KEYLESS,
    documented_rules,
    every_call,
    every_call_noted,
    functions_of,
    keys_of,
    registered_functions,
)
from tandem_testing.redis_fleets import RedisCluster, grant, redis_cluster
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, PAGE, PATIENT_S, Fleet, make_query, make_record, patient_router

RECORDS = (make_record("p", Role.PREFILL), make_record("d", Role.DECODE))
KEY = Keys("default").starting


class Place:
    """What a fleet or a router needs of a server: its URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def command(self, *args: str) -> str:
        raise AssertionError(f"which node is {args} for?")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory) -> AsyncIterator[RedisCluster]:
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    async with redis_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started) -> RedisCluster:
    """Empty."""
    for node in started.alive:
        if "role:master" in node.command("INFO", "replication"):
            node.wipe()
    return started


@pytest.fixture
async def breakable(tmp_path) -> AsyncIterator[RedisCluster]:
    """Of one test, which damages it."""
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    async with redis_cluster(tmp_path) as cluster:
        yield cluster


@asynccontextmanager
async def served(url: str) -> AsyncIterator[tuple[Fleet, Router]]:
    """Two workers and a router."""
    place = Place(url)
    fleet, router = Fleet(place, **LASTING), patient_router(place)
    await router.start()
    try:
        await fleet.join(router, *RECORDS)
        yield fleet, router
    finally:
        await router.stop()
        await fleet.close()


async def sources(router: Router, count: int = 2) -> list[Source]:
    return [(await router.choose(make_query(tuple(range(4 * PAGE))))).source for _ in range(count)]


def other(cluster: RedisCluster) -> RedisServer:
    """A primary that does not own the slot."""
    return next(node for node in cluster.primaries if node in cluster.alive and node is not cluster.owner(KEY))


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_any_node_leads_to_the_owner_of_all_keys(cluster, scheme):
    grant(cluster.nodes, documented_rules(), user="tandem", password="secret")
    fleet = Fleet(Place(cluster.url(other(cluster), scheme=scheme)), user="tandem:secret")
    with every_call_noted() as calls:
        await every_call(fleet)
    assert (fleet.client.failures, functions_of(calls)) == (0, registered_functions())
    keys = [keys_of(call) for call in calls if call[0] not in KEYLESS]
    assert all(keys), "a call without a key has no owner"
    assert {key_slot(key.encode()) for each in keys for key in each} == {key_slot(KEY.encode())}
    await fleet.close()


async def test_database_number_of_a_cluster_is_refused_by_name(cluster):
    client = RedisClient(RedisAddress(url=cluster.nodes[0].url.replace("/0", "/3")), timeout_s=PATIENT_S)
    with pytest.raises(RedisUnavailableError, match="a Redis Cluster has database 0 alone"):
        await client.require(wait_s=0)
    await client.close()


async def test_calls_follow_a_slot_while_and_after_it_moves(cluster):
    owner, taker, slot = cluster.owner(KEY), other(cluster), cluster.slot(KEY)
    grant(cluster.nodes, documented_rules(), user="tandem", password="secret")
    async with served(cluster.url(owner).replace("://", "://tandem:secret@")) as (fleet, router):
        sessions = SessionBindings(client=fleet.client, keys=fleet.keys)
        cluster.begin_move(KEY, taker)
        # Functions look for keys that there may not be, and the owner has no record of those that have left.
        assert await sources(router, 1) == [Source.LOCAL]
        for _ in range(4):
            with pytest.raises(RedisUnavailableError, match="TryAgain|non local key"):
                await fleet.beat(RECORDS[0])
        assert await sessions.open(SessionName(id="new"), ttl_s=60), "the taker has what is new"
        cluster.move_keys(owner, taker, slot)
        # The taker gets the functions with the first call that it gets.
        assert await sources(router) == [Source.REDIS] * 2
        assert await sessions.find(SessionName(id="new")) == SessionBinding()
        cluster.end_move(owner, taker, slot)
        assert await sources(router) == [Source.REDIS] * 2
        assert (await fleet.beat(RECORDS[0])).status is LeaseStatus.RENEWED
        assert await sessions.find(SessionName(id="new")) == SessionBinding()
        assert fleet.client.failures == 4
    assert cluster.owner(KEY) is taker


async def test_routes_continue_after_the_owner_of_the_slot_has_died(breakable):
    """The only node that the URL names is the one that dies."""
    cluster = breakable
    async with served(cluster.url(cluster.owner(KEY))) as (fleet, router):
        assert await sources(router, 1) == [Source.REDIS]
        await cluster.take_over(KEY)
        # Each connection fails once at most: it is broken, and the next one leads to another node.
        assert (await sources(router, 3))[-1] is Source.REDIS
        with suppress(RedisUnavailableError):
            await fleet.beat(RECORDS[0])
        assert (await fleet.beat(RECORDS[0])).status is LeaseStatus.RENEWED
