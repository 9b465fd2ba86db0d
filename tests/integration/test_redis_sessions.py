"""Bindings of sessions in a real Redis, as the gateways of one deployment share them."""

import pytest

from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.decision import NoWorkersError, RouteQuery, Source
from tandem_services.router.keys import Keys
from tandem_services.router.shared_state import SessionBinding, SessionBindings, SessionName
from tandem_testing.router_builders import LASTING, MODEL, PATIENT_S, Fleet, make_record, patient_router
from tandem_testing.waiting import until

NAME = SessionName(id="s", cache_salt="mine")
BOUND = SessionBinding(incarnation="w1@1", tokens=7, last_token=3)


@pytest.fixture
async def bindings(server):
    server.command("FLUSHALL")
    client = RedisClient(RedisAddress(url=server.url), timeout_s=PATIENT_S)
    yield SessionBindings(client=client, keys=Keys("default"))
    await client.close()


async def test_session_id_is_opened_once_and_free_after_close(bindings):
    assert await bindings.open(NAME, ttl_s=60)
    assert not await bindings.open(NAME, ttl_s=60)
    assert await bindings.find(NAME) == SessionBinding()
    assert await bindings.forget(NAME) == SessionBinding()
    assert await bindings.forget(NAME) is None
    assert await bindings.open(NAME, ttl_s=60)


async def test_update_does_not_bring_a_closed_session_back(bindings):
    await bindings.update(NAME, BOUND, ttl_s=60)
    assert await bindings.find(NAME) is None
    await bindings.put(NAME, BOUND, ttl_s=60)
    await bindings.update(NAME, SessionBinding(), ttl_s=60)
    assert await bindings.find(NAME) == SessionBinding()


async def test_binding_is_forgotten_after_its_time(bindings):
    await bindings.put(NAME, BOUND, ttl_s=0.02)

    async def forgotten() -> bool:
        return await bindings.find(NAME) is None

    await until(forgotten, PATIENT_S, "the binding is forgotten")


async def test_session_keys_differ_per_salt_and_reveal_nothing(bindings, server):
    await bindings.put(NAME, BOUND, ttl_s=60)
    assert await bindings.find(SessionName(id="s")) is None
    assert await bindings.find(SessionName(id="", cache_salt="mines")) is None
    assert "mine" not in str(server.command("KEYS", "*"))


@pytest.mark.parametrize("malformed", ["", "no json", '{"a": 1}', '["w", "many", 1]'])
async def test_malformed_session_binding_is_a_miss(bindings, server, malformed):  # [redis-values-untrusted]
    await bindings.put(NAME, BOUND, ttl_s=60)
    [key] = await bindings.client.command("KEYS", "*session*")
    server.command("SET", key.decode(), malformed)
    assert await bindings.find(NAME) is None


async def test_router_keeps_requested_worker(server):
    server.command("FLUSHALL")
    fleet = Fleet(server, **LASTING)
    await fleet.beat(make_record("w1"))
    router = patient_router(server)
    await router.start()
    query = RouteQuery(request_id="r", model=MODEL, token_ids=(1, 2, 3))
    try:
        await fleet.beat(make_record("w2"))
        choice = await router.stay(query, "w2@1")
        assert (choice.decode.worker_id, choice.prefill, choice.source) == ("w2", None, Source.SESSION)
        await router.release(choice)
        for gone in ("w3@1", "w2@2"):
            with pytest.raises(NoWorkersError):
                await router.stay(query, gone)
        router.mark_dead("w2@1")
        with pytest.raises(NoWorkersError):
            await router.stay(query, "w2@1")
    finally:
        await router.stop()
        await fleet.close()
