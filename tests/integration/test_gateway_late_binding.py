"""A gateway with the real router in front of a worker with little room: requests wait at the gateway."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.health import Health
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.sockets import listen
from tandem_services.gateway.app import api_app, build_gateway
from tandem_services.gateway.dispatch.generation import AT_ONCE
from tandem_services.gateway.queueing.precedence import MAX_EARLY
from tandem_services.gateway.serve import http_server
from tandem_services.router.decision import RouteDecision, RouteQuery
from tandem_services.router.router import Router, RouterConfig
from tandem_testing.gateway_builders import EngineRack, config_of, fleet_of
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import PATIENT_S, Fleet, make_load, make_record
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until

ROOM = 2
FLOOD = 4
"""Requests."""
MANY = 48
"""Choices of one request."""


async def report(fleet: Fleet, engine: MockEngine, most: list[int]) -> None:
    """As its worker would, five times a second."""
    while True:
        running = engine.running
        record = make_record("solo", load=make_load(sequences=running, max_sequences=ROOM))
        await fleet.beat(replace(record, view=replace(engine.view, model="m")))
        most.append(running)
        await asyncio.sleep(0.2)


@asynccontextmanager
async def serving(server: RedisServer, rack: EngineRack, folder: Path):
    """An HTTP client of a gateway with two tenants."""
    address = RedisAddress(url=server.url)
    router = Router(RouterConfig(redis=address, routing_timeout_s=PATIENT_S, background_timeout_s=PATIENT_S))
    await router.start()
    keys = write_keys(folder, flood={}, calm={"requests_per_minute": 2})
    config = config_of(names=("m",), api_keys=keys)
    boards = {"quarantine": router.quarantine, "fairness": router.fairness}
    health = Health()
    tokenizer = TextTokenizer.load(write_tokenizer(folder))
    fleet = fleet_of(config, router, router.sessions, rack.context, tokenizer, **boards)
    gateway = build_gateway(config, [fleet], clock=MonotonicClock(), health=health, usage=router.usage)
    http = http_server(api_app(gateway, metrics=True), config, health)
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        task = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
                await client.get("/live")
                yield client
        finally:
            http.should_exit = True
            await task
            await router.stop()


async def test_flood_waits_at_the_gateway_and_lets_another_tenant_by(server, tmp_path):
    server.wipe()
    most: list[int] = []
    ended: list[str] = []
    with EngineRack() as rack:
        engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.01))
        fleet = Fleet(server)
        reporting = asyncio.create_task(report(fleet, engine, most))

        async def ask(client: httpx.AsyncClient, tenant: str) -> httpx.Response:
            body = {"model": "m", "prompt": "hi", "max_tokens": 30, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body, headers=bearer(tenant))
            ended.append(tenant)
            return answer

        try:
            await until(lambda: bool(most), 60.0, "the worker is registered")
            async with serving(server, rack, tmp_path) as client:
                flood = [asyncio.create_task(ask(client, "flood")) for _ in range(16)]
                await asyncio.to_thread(engine.wait_until, lambda: engine.running > 0)
                calm = await ask(client, "calm")
                answers = await asyncio.gather(*flood)
                second, third = await ask(client, "calm"), await ask(client, "calm")
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await fleet.close()
    assert {answer.status_code for answer in (calm, *answers)} == {200}
    # All sixteen would run at once if they waited at the worker.
    assert max(most) <= 2 * ROOM + MAX_EARLY
    assert ended.index("calm") < 10
    assert {request.tenant for request in engine.received} == {"flood", "calm"}, "the worker computes them in turns"
    assert (calm.headers["x-ratelimit-remaining-requests"], second.status_code, third.status_code) == ("1", 200, 429)


@pytest.mark.parametrize("shape", ["n", "best_of", "prompts", "long_prompts", "long_outputs"])
async def test_short_chat_does_not_wait_for_any_choice_of_a_flood(server, tmp_path, monkeypatch, shape):
    """Whatever makes the flood large: no choice of it ends, and the other tenant's prompt is at the worker, which has
    a few choices and no queue. Few choices have queried the router by then: each query is one that others wait for."""
    server.wipe()
    most: list[int] = []
    queried: set[str] = set()
    choose = Router.choose

    async def noted(router: Router, query: RouteQuery) -> RouteDecision:
        queried.add(query.request_id)
        return await choose(router, query)

    monkeypatch.setattr(Router, "choose", noted)
    behavior = MockBehavior(token=hash_tokens(3, 250), hold_at=1)
    with EngineRack() as rack:
        engine = rack.add("solo", behavior)
        fleet = Fleet(server)
        reporting = asyncio.create_task(report(fleet, engine, most))

        async def complete(client: httpx.AsyncClient, tenant: str, **fields: object) -> httpx.Response:
            body = {"model": "m", "prompt": "hi", "max_tokens": 2, "ignore_eos": True, **fields}
            return await client.post("/v1/completions", json=body, headers=bearer(tenant))

        try:
            await until(lambda: bool(most), 60.0, "the worker is registered")
            async with serving(server, rack, tmp_path) as client:

                async def reaches_worker() -> bool:
                    return (await complete(client, "flood", max_tokens=1)).status_code == 200

                await until(reaches_worker, 60.0, "the gateway reaches the worker")
                engine.received.clear()
                queried.clear()
                flood = [asyncio.create_task(complete(client, "flood", **flood_of(shape, n))) for n in range(FLOOD)]
                await asyncio.to_thread(engine.wait_until, lambda: engine.running >= ROOM)
                calm = asyncio.create_task(complete(client, "calm"))
                await asyncio.to_thread(engine.wait_until, lambda: "calm" in {each.tenant for each in engine.received})
                sent, before = Counter(request.tenant for request in engine.received), len(queried)
                behavior.hold_at = None
                answers = await asyncio.gather(calm, *flood)
        finally:
            behavior.hold_at = None
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await fleet.close()
    assert [answer.text for answer in answers if answer.status_code != 200] == []
    # A report may be old when the second round of choices finds its places.
    assert sent["flood"] <= 2 * ROOM
    assert sent["calm"] == 1
    # On arrival, and those next in line since.
    assert before <= FLOOD * AT_ONCE + 4 * ROOM
    assert max(most) <= 2 * ROOM + MAX_EARLY


def flood_of(shape: str, number: int) -> dict[str, object]:
    """What makes request `number` of a flood a large one. Its prompts are longer than that of the short chat, whose
    tenant is behind then from the first one on."""
    prompt = f"{number} " + "hi " * 20
    match shape:
        case "n":
            return {"prompt": prompt, "n": MANY}
        case "best_of":
            return {"prompt": prompt, "best_of": 20}
        case "prompts":
            return {"prompt": [f"{n} {prompt}" for n in range(MANY)]}
        case "long_prompts":
            return {"prompt": prompt * 4}
        case _:
            return {"prompt": prompt, "max_tokens": 100}
