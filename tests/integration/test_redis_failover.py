"""A replica is promoted behind the same address, while connections to the former primary stay open.

Managed Redis does this at a failover, and so does a Kubernetes Service whose selector follows the primary.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.decision import Source
from tandem_services.router.registry import LeaseStatus
from tandem_testing.redis_fleets import RedisPair, redis_pair
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.router_builders import LASTING, PAGE, Fleet, make_query, make_record, patient_router

RECORDS = (make_record("p", Role.PREFILL), make_record("d", Role.DECODE))


@pytest.fixture
async def pair() -> AsyncIterator[RedisPair]:
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    async with redis_pair() as made:
        yield made


async def at_most_one_failure(call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except RedisUnavailableError:
        await call()


async def test_routes_are_read_from_redis_after_failover(pair):
    fleet = Fleet(pair, **LASTING)
    router = patient_router(pair)
    await router.start()
    try:
        await fleet.join(router, *RECORDS)
        query = make_query(tuple(range(4 * PAGE)))
        assert (await router.choose(query)).source is Source.REDIS
        await pair.in_step()
        pair.fail_over()
        # One command of each connection learns of it.
        assert (await router.choose(query)).source is not Source.REDIS
        assert (await router.choose(query)).source is Source.REDIS
        with pytest.raises(RedisUnavailableError):
            await fleet.beat(RECORDS[0])
        assert (await fleet.beat(RECORDS[0])).status is LeaseStatus.RENEWED
        await at_most_one_failure(router.refresh)
    finally:
        await router.stop()
        await fleet.close()


async def test_failover_to_empty_redis_restores_functions_and_workers(pair):
    fleet = Fleet(pair, **LASTING)
    router = patient_router(pair)
    await router.start()
    try:
        await fleet.join(router, *RECORDS)
        await pair.in_step()
        pair.fail_over()
        pair.primary.wipe()
        for record in RECORDS:
            await at_most_one_failure(partial(fleet.beat, record))
        await at_most_one_failure(router.refresh)
        sources = [(await router.choose(make_query(tuple(range(4 * PAGE))))).source for _ in range(2)]
        assert sources[-1] is Source.REDIS
    finally:
        await router.stop()
        await fleet.close()
