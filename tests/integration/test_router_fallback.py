"""Redis killed, hung, wiped, read-only, full, speaking nonsense: routing continues [redis-is-optional]."""

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.router.decision import Placement, Source
from tandem_services.router.registry import WorkerState
from tandem_services.router.router import Router, RouterConfig
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, PAGE, Fleet, chain_of, make_query, make_record, patient_router
from tandem_testing.service_clock import ServiceClock

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 60.0
PROMPT = tuple(range(10 * PAGE))
RECORDS = (make_record("p", Role.PREFILL), make_record("d1", Role.DECODE), make_record("d2", Role.DECODE))


@pytest.fixture
def server():
    process = RedisServer.start()
    yield process
    process.resume()
    process.stop()


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


@pytest.fixture
async def router(server, fleet):
    gateway = patient_router(server, routing_timeout_s=0.25, clock=MonotonicClock())
    await gateway.start()
    await fleet.join(gateway, *RECORDS)
    yield gateway
    await gateway.stop()


query = partial(make_query, token_ids=PROMPT)


async def until_source(router: Router, source: Source, *, beat=None) -> None:
    """Choose until `source` decides; every choice on the way must succeed."""
    deadline = time.monotonic() + PATIENCE_S
    while (choice := await router.choose(query())).source is not source:
        await router.release(choice)
        assert time.monotonic() < deadline, f"never chosen by {source}"
        if beat is not None:
            await beat()
        await asyncio.sleep(0.05)
    await router.release(choice)


async def beat_all(fleet: Fleet) -> None:
    for record in RECORDS:
        try:
            await fleet.beat(record)
        except RedisUnavailableError:
            return


async def test_killed_redis_loses_no_request_and_recovers(server, fleet, router):  # [redis-is-optional]
    server.kill()
    for _ in range(20):
        choice = await router.choose(query())
        assert choice.source is Source.LOCAL
        assert choice.placement in {Placement.PAIR, Placement.LOCAL}
        await router.release(choice)
    server.restart()
    await until_source(router, Source.REDIS, beat=lambda: beat_all(fleet))
    assert {worker.worker_id for worker in router.workers()} == {"p", "d1", "d2"}


async def test_last_view_excludes_worker_that_just_rejected(server, router):
    server.kill()
    for _ in range(20):
        router.note_refusal("d1@1", WorkerState.PAUSED)
        choice = await router.choose(query())
        assert (choice.source, choice.decode.worker_id) == (Source.LOCAL, "d2")
        await router.release(choice)


async def test_hung_redis_is_given_up_after_few_time_outs(server, router):  # [redis-bounded-wait]
    # No time passes in which it would try again.
    router._routing.breaker.clock = ServiceClock()
    before = router.redis_failures
    server.pause()
    sources = [(await router.choose(query())).source for _ in range(50)]
    assert set(sources) == {Source.LOCAL}
    # All but the first few were refused by the breaker without waiting.
    assert router.redis_failures - before == 3
    server.resume()


async def test_wiped_redis_loses_functions_and_registry_but_no_request(server, fleet, router):
    server.wipe()
    for _ in range(5):
        await router.refresh()
        assert (await router.choose(query())).decode.worker_id in {"d1", "d2"}
    await until_source(router, Source.REDIS, beat=lambda: beat_all(fleet))


async def test_workers_absent_after_redis_wipe_are_removed(server, fleet, router):
    server.wipe()
    await fleet.beat(RECORDS[0])
    await fleet.beat(RECORDS[1])
    deadline = time.monotonic() + PATIENCE_S
    while {worker.worker_id for worker in router.workers()} != {"p", "d1"}:
        assert time.monotonic() < deadline
        await fleet.beat(RECORDS[0])
        await fleet.beat(RECORDS[1])
        await router.refresh()
        await asyncio.sleep(0.2)


async def test_read_only_replica_is_as_good_as_none(server, router):  # [redis-is-optional]
    server.command("REPLICAOF", "127.0.0.1", "1")
    assert (await router.choose(query())).source is Source.LOCAL
    server.command("REPLICAOF", "NO", "ONE")


async def test_full_redis_is_as_good_as_none(server, fleet, router):  # [redis-is-optional]
    server.command("CONFIG", "SET", "maxmemory", "1")
    assert (await router.choose(query())).source is Source.LOCAL
    server.command("CONFIG", "SET", "maxmemory", "0")
    await until_source(router, Source.REDIS, beat=lambda: beat_all(fleet))


@pytest.mark.parametrize("key", ["fleet", "owner", "meta", "worker:d1", "fenced"])
async def test_poisoned_keys_cost_no_request(server, fleet, router, key):  # [redis-values-untrusted]
    server.command("DEL", fleet.keys.prefix + key)
    server.command("RPUSH", fleet.keys.prefix + key, "malformed")
    for _ in range(5):
        await router.refresh()
        assert (await router.choose(query())).decode.worker_id in {"d1", "d2"}
    await until_source(router, Source.REDIS, beat=lambda: beat_all(fleet))


@pytest.mark.parametrize("malformed", ["another type", "too many", "rows"])
async def test_registry_repaired_by_heartbeat_is_not_taken_as_empty(server, fleet, router, malformed):
    """The heartbeat that drops malformed data gets the news; the gateway, which asks later, must learn of it, too."""
    name = fleet.keys.prefix + "fleet"
    match malformed:
        case "another type":
            server.command("DEL", name)
            server.command("RPUSH", name, "malformed")
        case "too many":
            for first in range(0, 5000, 1000):
                fields = [word for number in range(first, first + 1000) for word in (f"many-{number}@1", "x")]
                server.command("HSET", name, *fields)
        case _:
            for worker in router.workers():
                server.command("HSET", name, worker.incarnation, "malformed")
            # A sweep is due; the heartbeat below makes it.
            server.command("HSET", fleet.keys.prefix + "meta", "swept_at", "0")
    await fleet.beat(RECORDS[0])
    await router.refresh()
    assert (await router.choose(query())).decode.worker_id in {"d1", "d2"}
    await until_source(router, Source.REDIS, beat=lambda: beat_all(fleet))


@pytest.mark.parametrize("field", ["request_endpoint", "peer_endpoint"])
async def test_worker_with_malformed_endpoint_is_not_chosen(server, fleet, router, field):
    def malformed(record):
        return replace(record, view=replace(record.view, **{field: "tcp://::/etc/passwd"}))

    reports = (malformed(RECORDS[0]), malformed(RECORDS[1]), RECORDS[2])
    # The old view may be used for a lease; then no worker without a valid endpoint is offered.
    deadline = time.monotonic() + PATIENCE_S
    while {worker.worker_id for worker in router.workers()} != {"d2"}:
        assert time.monotonic() < deadline
        for record in reports:
            await fleet.beat(record)
        await asyncio.sleep(0.2)
    for _ in range(10):
        choice = await router.choose(query())
        assert (choice.decode.worker_id, choice.prefill) == ("d2", None)
        await router.release(choice)
    assert router.counters.redis > 0


async def test_index_that_points_to_the_wrong_worker_is_a_cache_miss(server, fleet, router):
    await fleet.cache(RECORDS[1], chain_of(PROMPT))
    server.command("RENAME", fleet.keys.blocks("d1@1"), fleet.keys.blocks("nobody@7"))
    choice = await router.choose(query())
    assert choice.prefill is not None
    assert choice.matched_tokens == 0


async def test_routing_without_redis_keeps_locality_and_spreads_load(server, router):
    server.kill()
    # Long enough that what is cached saves more than the difference that counts as none.
    prompt = query(token_ids=tuple(range(400)))
    first = await router.choose(prompt)
    await router.release(first)
    assert (await router.choose(prompt)).decode == first.decode
    chosen = [await router.choose(query(token_ids=tuple(range(n, n + 100)))) for n in range(30)]
    counts = [sum(c.decode.worker_id == name for c in chosen) for name in ("d1", "d2")]
    assert min(counts) >= 10, counts


async def test_dead_worker_is_excluded_without_redis(server, router):  # [redis-is-optional]
    server.kill()
    router.mark_dead("d1@1")
    for _ in range(10):
        assert (await router.choose(query())).decode.worker_id == "d2"


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"*-7\r\n", b"\xff" * 100 + b"\r\n", b""]
)
async def test_server_with_invalid_replies_is_rejected_at_start(nonsense):  # [redis-is-optional]
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(nonsense)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        gateway = Router(RouterConfig(redis=RedisAddress(url=f"redis://127.0.0.1:{port}/0"), start_timeout_s=0))
        with pytest.raises(RedisUnavailableError, match="TANDEM_REDIS_URL"):
            await gateway.start()
        await gateway.stop()


async def test_router_start_without_redis_fails_and_hides_password():
    gateway = Router(RouterConfig(redis=RedisAddress(url="redis://me:secret@127.0.0.1:1/0"), start_timeout_s=0))
    with pytest.raises(RedisUnavailableError) as caught:
        await gateway.start()
    assert "secret" not in str(caught.value)
    assert "redis://me:***@127.0.0.1:1/0" in str(caught.value)
    await gateway.stop()
