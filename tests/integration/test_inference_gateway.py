"""The endpoint picker between a data plane (a real gRPC client) and gateways that redeem what it reserves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
import msgspec
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from tandem_services.common.sockets import free_port
from tandem_testing.ext_proc_builders import (
    BUFFERED,
    answer_body,
    answer_head,
    answer_trailers,
    body,
    head,
    kinds,
    set_headers,
    streamed,
)
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.router_builders import LASTING, Fleet, make_load
from tandem_testing.router_stack import ALIAS, MODEL, LiveRouter, live_gateway_of, live_router, report
from tandem_testing.waiting import until

DESTINATION = "x-gateway-destination-endpoint"
RESERVATION = "x-tandem-reservation"
PATH = "/v1/completions"
PATIENCE_S = 60.0
ANYWHERE = ["10.0.0.1:80"]
"""A subset where no gateway need be."""
REQUEST = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 4, "ignore_eos": True, "seed": 1}


@pytest.fixture
async def fleet(server, monkeypatch):
    monkeypatch.setattr("tandem_services.router.tickets.RESERVATION_MS", LASTING["RESERVATION_MS"])
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


@pytest.fixture
async def engines(fleet):
    """Two mock engines whose workers have registered."""
    with EngineRack() as rack:
        for name in ("w1", "w2"):
            await report(fleet, rack.add(name, MockBehavior(token=hash_tokens(3, 250))))
        yield rack


@dataclass
class Stream:
    """One exchange, as a data plane has it."""

    call: Any

    async def send(self, message: Any, answers: int = 1) -> list[Any]:
        await self.call.write(message)
        async with asyncio.timeout(PATIENCE_S):
            return [await self.call.read() for _ in range(answers)]


@asynccontextmanager
async def exchange(live: LiveRouter) -> AsyncIterator[Stream]:
    call = live.channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=ext_proc.ProcessingRequest.SerializeToString,
        response_deserializer=ext_proc.ProcessingResponse.FromString,
    )()
    try:
        yield Stream(call)
    finally:
        call.cancel()


async def picked(stream: Stream, request: Any = REQUEST, **fields: Any) -> dict[str, str]:
    """Headers that a request gets on its way; its body must come back as it was."""
    content = request if isinstance(request, bytes) else msgspec.json.encode(request)
    await stream.send(head(**fields), 0)
    first, rest = await stream.send(body(content), 2)
    assert kinds([first, rest]) == ["request_headers", "request_body"]
    assert streamed([rest]) == (content, True)
    headers = set_headers(first)
    metadata = first.dynamic_metadata["envoy.lb"]
    assert metadata[DESTINATION] == headers[DESTINATION]
    return headers


async def refused(live: LiveRouter, request: Any = REQUEST, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that is answered in place."""
    content = request if isinstance(request, bytes) else msgspec.json.encode(request)
    async with exchange(live) as stream:
        await stream.send(head(**fields), 0)
        (answer,) = await stream.send(body(content))
        assert answer.WhichOneof("response") == "immediate_response", answer
        # The router says no more, and ends the stream.
        assert await stream.call.read() is grpc.aio.EOF
        immediate = answer.immediate_response
        return immediate.status.code, msgspec.json.decode(immediate.body)["error"]


async def test_gateway_executes_picked_choice_and_end_releases_it(server, engines, tmp_path):
    async with live_gateway_of(server, engines, tmp_path / "gateway") as url:
        endpoint = url.removeprefix("http://")
        async with live_router(server, tmp_path / "router", gateways=(endpoint,)) as live:
            await until(lambda: endpoint in live.server.endpoints.ready, PATIENCE_S, "the gateway is ready")
            async with exchange(live) as stream:
                headers = await picked(stream)
                assert headers[DESTINATION] == endpoint
                assert live.server.endpoints.running(endpoint) == 1
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                    given = {RESERVATION: headers[RESERVATION]}
                    answer = await client.post(PATH, json=REQUEST, headers=given)
                    alone = await client.post(PATH, json=REQUEST)
                    explain = f"/v1/requests/{answer.headers['x-request-id']}/explain"
                    (attempt,) = (await client.get(explain)).json()["choices"][0]["attempts"]
                assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
                record = (await live.http.get(f"/v1/choices/{headers[RESERVATION]}")).json()
                assert (attempt["source"], attempt["decode"]) == ("router", record["choice"]["decode"]["incarnation"])
                assert record["state"] == "open"
                await stream.send(answer_head(served=endpoint))
                assert len(live.server.routing.holds) == 1
                await stream.send(answer_body(answer.content, end=False))
                await stream.send(answer_trailers())
                await until(lambda: not len(live.server.routing.holds), PATIENCE_S, "the choice is released")
            assert live.server.endpoints.running(endpoint) == 0


async def test_chats_and_responses_are_read_as_the_gateway_reads_them(server, engines, tmp_path):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}], "max_tokens": 3}
    requests = {
        "/v1/chat/completions": chat,
        "/v1/chat/completions?beta=1": chat | {"n": 2, "temperature": 1.0},
        "/v1/chat/completions?beta=2": chat | {"model": ALIAS},
        "/v1/messages": {"model": MODEL, "messages": chat["messages"], "max_tokens": 3},
        "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 3},
    }
    async with (
        live_gateway_of(server, engines, tmp_path / "gateway") as url,
        live_router(server, tmp_path / "router") as live,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        for path, request in requests.items():
            async with exchange(live) as stream:
                headers = await picked(stream, request, path=path, subset=ANYWHERE)
                given = {RESERVATION: headers[RESERVATION]}
                answer = await client.post(f"{url}{path}", json=request, headers=given)
            assert answer.status_code == 200, answer.text
            record = (await client.get(f"{url}/v1/requests/{answer.headers['x-request-id']}/explain")).json()
            # A choice of the router is for one output; the gateway places further ones by itself.
            first, *further = (choice["attempts"][0]["source"] for choice in record["choices"])
            assert (first, further) == ("router", ["redis"] * (request.get("n", 1) - 1)), path


async def source_of(client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> str:
    """The source of the route decision of a request that comes to the gateway with these headers."""
    answer = await client.post(f"{url}{PATH}", json=REQUEST, headers=headers)
    explain = f"{url}/v1/requests/{answer.headers['x-request-id']}/explain"
    return (await client.get(explain, headers=headers)).json()["choices"][0]["attempts"][0]["source"]


async def test_ticket_is_redeemable_only_by_its_tenant(server, engines, tmp_path):
    keys = write_keys(tmp_path, ann={}, bob={})
    async with (
        live_gateway_of(server, engines, tmp_path / "gateway", api_keys=keys) as url,
        live_router(server, tmp_path / "router", api_keys=keys) as live,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        for wrong in ({}, {"authorization": "Bearer nobody"}):
            assert (await refused(live, subset=ANYWHERE, **wrong))[0] == 401
        for sender, source in (("ann", "router"), ("bob", "redis")):
            async with exchange(live) as stream:
                headers = await picked(stream, authorization=bearer("ann")["Authorization"], subset=ANYWHERE)
                given = {RESERVATION: headers[RESERVATION]} | bearer(sender)
                assert await source_of(client, url, given) == source


async def test_bad_bodies_are_refused_as_the_gateway_would(server, engines, tmp_path):
    bad = {
        "nothing": (b"", None),
        "broken": (b'{"model": ', None),
        "deep": (b"[" * 100, None),
        "a bad field": (REQUEST | {"max_tokens": -1}, "max_tokens"),
        "a bad token": (REQUEST | {"prompt": [10**6]}, "prompt"),
        "too long": (REQUEST | {"prompt": "word " * 5000}, "prompt"),
    }
    async with live_router(server, tmp_path) as live:
        for name, (request, param) in bad.items():
            code, error = await refused(live, request, subset=ANYWHERE)
            assert (code, error["param"]) == (400, param), name
        assert len(live.server.routing.holds) == 0


async def test_unread_body_goes_to_gateway_without_reservation(server, engines, tmp_path):
    requests = {
        "another model": (PATH, REQUEST | {"model": "other"}),
        "another path": ("/tokenize", {"model": MODEL, "prompt": "x"}),
        "several prompts": (PATH, REQUEST | {"prompt": ["a", "b"]}),
    }
    async with live_router(server, tmp_path) as live:
        for name, (path, request) in requests.items():
            async with exchange(live) as stream:
                assert await picked(stream, request, path=path, subset=ANYWHERE) == {DESTINATION: ANYWHERE[0]}, name


async def test_picker_without_capacity_queues_or_rejects_request(server, fleet, tmp_path):
    with EngineRack() as rack:
        engine = rack.add("full", MockBehavior(token=hash_tokens(3, 250)))
        await report(fleet, engine, load=make_load(sequences=64))
        async with live_router(server, tmp_path) as live:
            async with exchange(live) as stream:
                assert await picked(stream, subset=ANYWHERE) == {DESTINATION: ANYWHERE[0]}
            code, error = await refused(live, REQUEST | {"priority": -1}, subset=ANYWHERE)
            assert (code, error["code"]) == (429, "no_room")
            live.router.mark_dead(engine.view.incarnation)
            assert (await refused(live, subset=ANYWHERE))[0] == 503
            assert len(live.server.routing.holds) == 0


async def test_only_ready_gateways_of_the_subset_are_picked(server, engines, tmp_path):
    async with live_gateway_of(server, engines, tmp_path / "gateway") as url:
        endpoint = url.removeprefix("http://")
        dead = f"127.0.0.1:{free_port()}"
        async with live_router(server, tmp_path / "router", gateways=(endpoint, dead)) as live:
            await until(lambda: bool(live.server.endpoints.ready), PATIENCE_S, "a gateway is ready")
            for subset in (None, [endpoint], [endpoint, dead, "10.0.0.1:80"]):
                async with exchange(live) as stream:
                    assert (await picked(stream, subset=subset))[DESTINATION] == endpoint
            for subset in ([], [dead], ["10.0.0.1:80"]):
                assert (await refused(live, subset=subset))[0] == 503


async def test_disconnected_exchange_releases_reservation_and_memory(server, engines, tmp_path):
    async with live_router(server, tmp_path) as live:
        async with exchange(live) as stream:
            await picked(stream, subset=ANYWHERE)
            assert (len(live.server.routing.holds), live.server.grpc.processor.places.taken) == (1, 1)
        await until(lambda: not len(live.server.routing.holds), PATIENCE_S, "the choice is released")
        await until(lambda: not live.server.grpc.processor.places.taken, PATIENCE_S, "the exchange has ended")
        async with exchange(live) as stream:
            await stream.send(head(), 0)
            await stream.send(body(b"x" * 1000, end=False), 0)
            await until(lambda: live.server.grpc.processor.memory.taken == 1000, PATIENCE_S, "the body has arrived")
        await until(lambda: not live.server.grpc.processor.memory.taken, PATIENCE_S, "the body is forgotten")


async def test_buffered_bodies_get_their_destination_too(server, engines, tmp_path):
    async with live_router(server, tmp_path) as live, exchange(live) as stream:
        (first,) = await stream.send(head(mode=BUFFERED, subset=ANYWHERE))
        assert set_headers(first) == {}
        (second,) = await stream.send(body(msgspec.json.encode(REQUEST)))
        assert set_headers(second).keys() == {DESTINATION, RESERVATION}


async def test_exchange_beyond_limit_is_429_and_invalid_order_an_error(server, engines, tmp_path):
    async with live_router(server, tmp_path, max_exchanges=1) as live:
        async with exchange(live) as stream:
            await picked(stream, subset=ANYWHERE)
            async with exchange(live) as second:
                (answer,) = await second.send(head())
                assert answer.immediate_response.status.code == 429
        await until(lambda: not live.server.grpc.processor.places.taken, PATIENCE_S, "the exchange has ended")
        async with exchange(live) as stream:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.send(answer_head())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
