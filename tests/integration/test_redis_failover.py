"""A replica is promoted behind the same address, while connections to the former primary stay open.

Managed Redis does this at a failover, and so does a Kubernetes Service whose selector follows the primary.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.decision import Source
from tandem_services.router.registry import LeaseStatus
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, PAGE, Fleet, make_query, make_record, patient_router
from tandem_testing.tcp_proxy import TcpProxy
from tandem_testing.waiting import until

RECORDS = (make_record("p", Role.PREFILL), make_record("d", Role.DECODE))
UP_S = 60.0


@dataclass
class Pair:
    """A primary and its replica behind one address."""

    primary: RedisServer
    replica: RedisServer
    proxy: TcpProxy

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def fail_over(self) -> None:
        """Promote the replica; the former primary becomes its replica and keeps its connections."""
        self.replica.command("REPLICAOF", "NO", "ONE")
        self.primary.command("REPLICAOF", self.replica.host, str(self.replica.port))
        self.primary, self.replica = self.replica, self.primary

    async def in_step(self) -> None:
        """Wait until the replica has what the primary has."""
        await until(lambda: "master_link_status:up" in self.replica.command("INFO", "replication"), UP_S, "a replica")
        await until(lambda: "1" in self.primary.command("WAIT", "1", "100"), UP_S, "the replica has all writes")


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    primary = RedisServer.start("--repl-diskless-sync-delay", "0")
    replica = RedisServer.start(
        "--repl-diskless-sync-delay", "0", "--replicaof", f"{primary.host} {primary.port}"
    )  # fmt: skip
    try:
        proxy = await TcpProxy.open(lambda: (made.primary.host, made.primary.port))
        made = Pair(primary, replica, proxy)
        yield made
        await proxy.close()
    finally:
        primary.stop()
        replica.stop()


async def at_most_one_failure(call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except RedisUnavailableError:
        await call()


async def test_routes_come_from_redis_again_after_a_failover(pair):
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


async def test_functions_and_workers_return_after_a_failover_to_an_empty_server(pair):
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
