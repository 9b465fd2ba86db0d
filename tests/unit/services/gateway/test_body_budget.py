"""Bytes of bodies in flight are bounded, for all clients and for each; long bodies are parsed by a thread."""

import asyncio
import json
import random
import re
import threading
from contextlib import AsyncExitStack

import pytest

from tandem_services.common.errors import ApiError
from tandem_services.gateway.http import body as json_shape
from tandem_services.gateway.http.body import BodyDecoder, check_json_shape
from tandem_services.gateway.limits import BodyBudget, BodyCharge
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.key_files import bearer, key_of, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.waiting import until

KIB = 1 << 10
PARSED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
READ = ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/sessions", "/open_session", "/close_session")


@pytest.fixture
async def bounded(rack, tokenizer):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    small = {"bodies_bytes": 100 * KIB, "bodies_bytes_per_client": 100 * KIB}
    async with live_gateway(rack.context, tokenizer, rack.engines, **small) as live:
        yield live


async def held(gateway) -> int:
    text = (await gateway.http.get("/metrics")).text
    return int(float(re.search(r"^tandem_gateway_request_body_bytes (\S+)$", text, re.MULTILINE)[1]))


async def is_held(gateway, size: int) -> None:
    async def so_many() -> bool:
        return await held(gateway) == size

    await until(so_many, timeout_s=60, what=f"{size} bytes are held")


async def unfinished(gateway, stack: AsyncExitStack, size: int, *headers: str, length: int | None = None):
    """A request whose body is announced, of which `size` bytes are sent."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {length or size + 1}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + b" " * size)
    return reader


async def status_of(reader) -> int:
    async with asyncio.timeout(60):
        return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


async def test_bodies_unfinished_beyond_the_budget_are_a_429(bounded):
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await unfinished(bounded, stack, 30 * KIB)
        await is_held(bounded, 90 * KIB)
        # The head alone: what does not fit is refused before it is sent.
        refused = await unfinished(bounded, stack, 0, length=20 * KIB)
        assert await status_of(refused) == 429
        assert (await bounded.complete(max_tokens=1)).status_code == 200
    await is_held(bounded, 0)
    assert (await bounded.complete("a" * 20 * KIB)).status_code == 400, "too long a prompt, which was read"


async def test_body_in_chunks_beyond_the_budget_is_a_429(bounded):
    async with AsyncExitStack() as stack:
        await unfinished(bounded, stack, 90 * KIB)
        await is_held(bounded, 90 * KIB)

        async def pieces():
            for _ in range(20):
                yield b" " * KIB

        answer = await bounded.http.post(
            "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "bodies_in_flight")
        assert answer.headers["retry-after"] == "1"
        await is_held(bounded, 90 * KIB)


async def test_body_longer_than_the_budget_is_a_413(bounded):
    async with AsyncExitStack() as stack:
        assert await status_of(await unfinished(bounded, stack, 0, length=100 * KIB + 1)) == 413
    assert await held(bounded) == 0


async def test_body_budget_of_one_tenant_leaves_others_theirs(rack, tokenizer, tmp_path):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    keys = write_keys(tmp_path, ann={}, bob={}, root={"admin": True})
    small = {"bodies_bytes": 100 * KIB, "bodies_bytes_per_client": 40 * KIB, "api_keys": keys}
    async with live_gateway(rack.context, tokenizer, rack.engines, **small) as live, AsyncExitStack() as stack:
        live.http.headers.update(bearer("root"))
        ann = f"Authorization: Bearer {key_of('ann')}"
        await unfinished(live, stack, 39 * KIB, ann)
        await is_held(live, 39 * KIB)
        assert await status_of(await unfinished(live, stack, 0, ann, length=2 * KIB)) == 429
        body = {"model": "mock", "prompt": "hi", "max_tokens": 1, "user": "x" * 400, "metadata": {"a": "b" * 500}}
        answer = await live.http.post("/v1/completions", json=body, headers=bearer("bob"))
        assert answer.status_code == 200, answer.text


async def test_body_is_given_back_once_its_request_is_read(rack, tokenizer):
    gate = threading.Event()

    def held_up(request, position):
        gate.wait(60)
        return 5

    rack.add("solo", MockBehavior(token=held_up))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        try:
            running = asyncio.create_task(live.complete("hi", max_tokens=2))
            await until(lambda: bool(rack.engines[0].received), timeout_s=60, what="the engine has the request")
            await is_held(live, 0)
            assert not running.done()
        finally:
            gate.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize("path", [*PARSED, *READ])
async def test_body_parsing_of_long_bodies_is_on_a_thread(gateway, monkeypatch, path):
    threads = []
    decode = BodyDecoder.decode

    def noted(decoder, body):
        threads.append(threading.get_ident())
        return decode(decoder, body)

    monkeypatch.setattr(BodyDecoder, "decode", noted)
    monkeypatch.setattr("tandem_services.gateway.http.body.PARSED_HERE_BYTES", 1000)
    for size in (10, 2000):
        body = json.dumps({"model": "mock", "unknown": "x" * size}).encode()
        await gateway.http.post(path, content=body, headers={"Content-Type": "application/json"})
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


@pytest.mark.parametrize("seed", range(20))
def test_body_budget_never_exceeds_its_bounds(seed):
    draw = random.Random(seed)
    budget = BodyBudget(most=1000, most_per_client=400)
    charges = [BodyCharge(budget=budget) for _ in range(12)]
    clients = [f"client{number % 4}" for number in range(12)]
    for charge, client in zip(charges, clients, strict=True):
        charge.announce(client, 0)
    held = [0] * 12
    for _ in range(500):
        number = draw.randrange(12)
        if draw.random() < 0.2:
            charges[number].release()
            held[number] = 0
            continue
        size = draw.randrange(200)
        mine = sum(bytes_ for bytes_, client in zip(held, clients, strict=True) if client == clients[number])
        fits = mine + size <= 400 and sum(held) + size <= 1000
        if fits:
            charges[number].add(size)
            held[number] += size
        else:
            with pytest.raises(ApiError) as refused:
                charges[number].add(size)
            assert refused.value.status == (413 if held[number] + size > 400 else 429)
        assert budget.held == sum(held)
    for charge in charges:
        charge.release()
        charge.release()
    assert budget == BodyBudget(most=1000, most_per_client=400), "no client is remembered"


def test_json_with_too_many_values_is_refused(monkeypatch):
    monkeypatch.setattr(json_shape, "MAX_JSON_VALUES", 10)
    check_json_shape(b'{"prompt": [1,1,1,1,1,1,1,1,1,1]}')
    check_json_shape(rb'{"prompt": ",,,,,,,,,,,\",,,,,,,,,,\\", "a": "\\,,,"}')
    with pytest.raises(ApiError, match="more than 10 values"):
        check_json_shape(b'{"prompt": [1,1,1,1,1,1,1,1,1,1,1,1]}')


def test_json_with_too_many_strings_is_refused_before_its_values():
    """To count values, strings are taken out by one call of C: millions of them stopped other threads."""
    message = b'{"role":"user","content":"hi"}'
    with pytest.raises(ApiError, match="strings, lists and objects"):
        check_json_shape(b'{"messages":[' + b",".join([message] * 1_050_000) + b"]}")
