"""A gateway with two cells over HTTP: mock engines, each cell with a real Redis."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus

import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.fleets import RoutedFleet
from tandem_services.router.cells.cell_router import CellRouter
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.router import Router, RouterConfig
from tandem_testing.gateway_builders import EngineRack, config_of, fleet_of, serving_fleets
from tandem_testing.metric_text import metric_sum
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import PATIENT_S, Fleet, make_load, make_record
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 60.0
HOME, WEST = "home", "west"
HELD_AT, TOKENS = 10, 24
FULL = make_load(sequences=64)


def behavior(**changes) -> MockBehavior:
    return MockBehavior(token=hash_tokens(3, 250), step_s=0.01, **changes)


@pytest.fixture
def servers():
    started = {HOME: RedisServer.start(), WEST: RedisServer.start()}
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture
def rack():
    with EngineRack() as engines:
        yield engines


@asynccontextmanager
async def beating(server: RedisServer, cell: str, engine: MockEngine, load=None):
    """The worker of `engine` reports to the Redis of `cell`, while it answers, until the block ends."""
    fleet = Fleet(server, cluster=cell)
    record = make_record("any", load=load or make_load())
    record = replace(record, view=replace(engine.view, model="m"))

    async def beat() -> None:
        while True:
            with contextlib.suppress(RedisUnavailableError):  # the test has killed it
                await fleet.beat(record)
            await asyncio.sleep(0.3)

    await fleet.beat(record)
    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await fleet.close()


@asynccontextmanager
async def gateway_at_home(servers, folder, context):
    """Its client."""
    tokenizer = TextTokenizer.load(write_tokenizer(folder))
    west = CellPlace(name=WEST, url=servers[WEST].url)
    settings = config_of(path=folder, names=("m",), cluster=HOME, cells=(west,), recovery_s=PATIENCE_S)
    routing = RouterConfig(redis=RedisAddress(url=servers[HOME].url), cluster=HOME, routing_timeout_s=PATIENT_S)
    router = CellRouter(routing, [west], model="m", worker_wait_s=1.0)
    parts = fleet_of(settings, router, router.sessions, context, tokenizer, cells=router.figures)
    await router.start()
    try:
        async with serving_fleets(settings, [parts]) as http:
            yield http
    finally:
        await router.stop()


async def attempts_of(http, answer_id: str) -> list[dict]:
    record = (await http.get(f"/v1/requests/{answer_id}/explain")).json()
    return [attempt for choice in record["choices"] for attempt in choice["attempts"]]


async def cell_of(http) -> dict | int | None:
    """The cell that served a request, None for the gateway's own; or the status of an answer without tokens."""
    body = {"model": "m", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != HTTPStatus.OK:
        return answer.status_code
    return (await attempts_of(http, answer.json()["id"]))[-1]["cell"]


async def test_full_cell_is_relieved_by_another_as_explain_and_metrics_say(servers, rack, tmp_path):
    home, west = rack.add("h", behavior()), rack.add("w", behavior())
    async with (
        beating(servers[HOME], HOME, home, FULL),
        beating(servers[WEST], WEST, west),
        gateway_at_home(servers, tmp_path, rack.context) as http,
    ):
        await until(lambda: _served_in(http, WEST, "full"), PATIENCE_S, "the other cell serves")
        metrics = (await http.get("/metrics")).text
        reported = {
            name: metric_sum(metrics, f"tandem_gateway_cell_{name}") for name in ("reachable", "awake", "workers")
        }
        assert reported == {"reachable": 1, "awake": 1, "workers": 2}
        moved = metric_sum(metrics, 'tandem_gateway_cell_decisions_total{cell="west",reason="full"}')
        assert moved >= 1


async def test_stream_of_a_dead_cell_resumes_in_another_and_returns(servers, rack, tmp_path):
    home, west = rack.add("h", behavior(hold_at=HELD_AT)), rack.add("w", behavior())
    async with beating(servers[WEST], WEST, west), gateway_at_home(servers, tmp_path, rack.context) as http:
        async with beating(servers[HOME], HOME, home):
            await until(lambda: _is_home(http), PATIENCE_S, "the own cell serves")
            body = {"model": "m", "prompt": "a story", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as stream:
                pieces: list[int] = []
                async for event in _events(stream):
                    answer_id = event["id"]
                    pieces += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                    if len(pieces) >= HELD_AT / 2 and home in rack.engines:
                        rack.engines.remove(home)
                        servers[HOME].kill()
                        await asyncio.to_thread(home.stop)
        attempts = await attempts_of(http, answer_id)
        assert [attempt["cell"] and attempt["cell"]["name"] for attempt in attempts] == [None, WEST]
        assert len(pieces) == TOKENS
        await until(lambda: _served_in(http, WEST, "no_worker"), PATIENCE_S, "the other cell serves")
        servers[HOME].restart()
        again = rack.add("h2", behavior())
        async with beating(servers[HOME], HOME, again):
            await until(lambda: _is_home(http), PATIENCE_S, "the own cell serves again")


async def _events(stream) -> AsyncIterator[dict]:
    """Split by bytes: texts may have characters that end a line."""
    rest = b""
    async for piece in stream.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: "))


async def _served_in(http, cell: str, reason: str) -> bool:
    return await cell_of(http) == {"name": cell, "reason": reason}


async def _is_home(http) -> bool:
    return await cell_of(http) is None


async def test_gateway_without_cells_has_the_plain_router(servers, tmp_path):
    """It pays nothing for them."""
    tokenizer, west = TextTokenizer.load(write_tokenizer(tmp_path)), CellPlace(name=WEST, url=servers[WEST].url)
    config = ModelConfig(path=tmp_path, names=("m",), redis=RedisAddress(url=servers[HOME].url))
    kinds = []
    for cells in ((), (west,)):
        fleet = RoutedFleet.of(replace(config, cells=cells), tokenizer, None)
        kinds.append((type(fleet.router), fleet.parts.cells is None))
        await fleet.close()
    assert kinds == [(Router, True), (CellRouter, False)]
