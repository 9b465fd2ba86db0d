"""Random bodies, strange paths, many names: always an answer in OpenAI's shape, and nothing grows."""

import asyncio
import gc
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tandem_services.common.errors import ApiError
from tandem_services.gateway.api.adapters import ADAPTER_PATHS
from tandem_services.gateway.app import create_app
from tandem_services.gateway.http.body import MAX_JSON_DEPTH, MAX_JSON_PARTS, check_json_shape
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

ROUTES = {
    "public": {
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/sessions"),
        ("DELETE", "/v1/sessions/{session_id:path}"),
        ("POST", "/open_session"),
        ("POST", "/close_session"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name:path}"),
        ("GET", "/v1/requests/{request_id}/explain"),
        ("POST", "/tokenize"),
        ("POST", "/v1/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/detokenize"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("GET", "/load"),
        ("GET", "/tokenizer_info"),
    },
    "probe": {("GET", "/live"), ("GET", "/ready"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")},
    "metrics": {("GET", "/metrics")},
    "admin": {("POST", path) for path in ADAPTER_PATHS},
}
"""Every route of a gateway with its users. A route that is not here fails the test below."""

INTERNAL = re.compile(r"Traceback|0x[0-9a-f]{6}|tcp://|redis://|\d+\.\d+\.\d+\.\d+|\.py\b|/work|/usr|site-packages")
"""What no answer may contain [errors-reveal-nothing], Triton CVE-2025-23319."""


def check_error(answer: httpx.Response) -> None:
    """One error in OpenAI's shape, or Anthropic's on its routes, that tells nothing about the inside."""
    assert answer.status_code < 500, answer.text
    error = answer.json()["error"]
    anthropic = answer.url.path.startswith("/v1/messages")
    assert set(error) == ({"message", "type"} if anthropic else {"message", "type", "param", "code"})
    assert isinstance(error["message"], str)
    assert error["message"].isprintable()
    assert not INTERNAL.search(answer.text), answer.text
    assert answer.headers["x-request-id"]


# Routes


def test_every_route_is_listed_with_its_class(rack, tokenizer):
    config = config_of()
    app = create_app(config, [fleet_of(config, FakeChooser([]), SessionShelf(), rack.context, tokenizer)])
    found = set()
    for route in app.routes:
        assert isinstance(route, Route), route
        found |= {(method, route.path) for method in (route.methods or set()) - {"HEAD"}}
    assert found == set().union(*ROUTES.values())


@pytest.mark.parametrize(("allowed", "path"), sorted(set().union(*ROUTES.values())))
async def test_other_methods_are_refused_and_the_right_one_is_named(gateway, allowed, path):  # [methods-named]
    served = {method for method, each in set().union(*ROUTES.values()) if each == path}
    path = re.sub(r"\{.*?\}", "x", path)
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        answer = await gateway.http.request(method, path)
        if method in served or (method == "HEAD" and "GET" in served):
            assert answer.status_code != 405
            continue
        assert answer.status_code == 405, (method, path, answer.text)
        assert allowed in answer.headers["allow"]
        if method != "HEAD":
            check_error(answer)


async def raw(gateway, head: str) -> tuple[int, bytes]:
    """Status and body of one request whose head is sent as it is; 0 when the connection was just closed."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode("latin-1") + b"\r\n\r\n")
    await writer.drain()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return (int(answer.split(b" ", 2)[1]) if answer else 0), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "/%2e%2e/metrics",
        "/v1/models%00",
        "/metrics/",
        "/live/",
        "/v1/chat/completions/",
        "/v1/models;x",
        "/\\v1/models",
        "/v1/x?y#z",
    ],
)
async def test_path_is_taken_as_it_is_written(gateway, target):  # [heads-bounded] [one-host]
    status, body = await raw(gateway, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close")
    assert status in (400, 404, 405)
    if status != 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 65 + b"]" * 65,
        b'{"x":' * 65 + b"1" + b"}" * 65,
        b'{"s":"\\\\","x":' + b"[" * 64 + b"]" * 64 + b"}",
        b"[" * 100_000,
        b'["\\"' + b"[" * 70 + b'",' + b"[" * 64,
    ],
)
def test_deep_nesting_is_found_before_parsing(body):  # [json-bounded]
    with pytest.raises(ApiError, match="nested deeper than 64"):
        check_json_shape(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH,
        b'{"prompt":"' + b"[" * 1000 + b'"}',
        b'{"prompt":"\\"' + b"[" * 1000 + b'\\\\"}',
        json.dumps({"messages": [{"role": "user", "content": '[[{{\\"'}] * 2048}).encode(),
    ],
)
def test_brackets_in_strings_and_side_by_side_are_not_nesting(body):
    check_json_shape(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b'["a"],' * MAX_JSON_PARTS + b"1]",
        b"{" + b",".join(b'"k%d":1' % number for number in range(MAX_JSON_PARTS + 1)) + b"}",
        b"[" + b'"a",' * (MAX_JSON_PARTS + 1) + b"1]",
    ],
    ids=["lists", "keys", "strings"],
)
def test_body_of_too_many_parts_is_refused(body):  # [json-bounded]
    with pytest.raises(ApiError, match=f"more than {MAX_JSON_PARTS}"):
        check_json_shape(body)


def test_quotes_inside_a_string_are_no_parts():  # [json-bounded]
    check_json_shape(json.dumps({"prompt": '"a", ' * MAX_JSON_PARTS}).encode())


def random_value(rng: random.Random, depth: int = 0) -> Any:
    scalars = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-12]
    scalars += ["", "x", "\x00\x1b[2J", "é\U0001f600", "../../etc/passwd", "a" * 5000, "stop", "user", "text"]
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(scalars)
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ("role", "content", "type", "text", "1", "include_usage", "")
    return {rng.choice(keys): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_body(rng: random.Random) -> bytes:
    """A sound request with a few fields replaced, sometimes damaged as bytes."""
    body: dict[str, Any] = {"model": "mock", "max_tokens": 2, "prompt": "hi", "input": "hi", "tokens": [5]}
    body["max_output_tokens"] = 2
    body["messages"] = [{"role": "user", "content": "hi"}]
    fields = [*body, "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "stream", "echo"]
    fields += ["logprobs", "top_logprobs", "stream_options", "logit_bias", "user", "metadata", "priority", "cache_salt"]
    fields += ["tool_choice", "instructions", "text", "store", "include", "parallel_tool_calls", "include_reasoning"]
    fields += ["tools", "response_format", "best_of", "min_tokens", "ignore_eos", "kv_transfer_params", "made_up"]
    for _ in range(rng.randrange(4)):
        body[rng.choice(fields)] = random_value(rng)
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.2:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


async def test_random_bodies_get_an_answer_or_a_clear_refusal(gateway, caplog):
    rng = random.Random(7)
    answered = 0
    for number in range(500):
        path = (CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/detokenize")[number % 5]
        answer = await gateway.http.post(path, content=random_body(rng))
        answered += answer.status_code == 200
        if answer.status_code != 200:
            check_error(answer)
    assert 50 < answered < 450
    assert not [record for record in caplog.records if record.exc_info]
    assert (await gateway.complete(max_tokens=1)).status_code == 200


# Growth


async def test_made_up_names_do_not_become_time_series(gateway):  # [bounded-labels]
    await gateway.complete(max_tokens=1)
    await gateway.chat(model="made-up", max_tokens=1)
    before = len((await gateway.http.get("/metrics")).text.splitlines())
    for number in range(300):
        await gateway.chat(model=f"made-up-{number}", max_tokens=1)
        await gateway.http.get(f"/v1/models/made-up-{number}")
        await gateway.http.request(f"METHOD{number}", f"/made/up/{number}")
    text = (await gateway.http.get("/metrics")).text
    # "other" with status 404 and 405 are new.
    assert len(text.splitlines()) <= before + 4
    assert "made-up" not in text


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_finished_requests_leave_nothing_behind(rack, tokenizer, gateway):
    async def once(number: int) -> None:
        answer = await gateway.complete(max_tokens=2, stream=number % 2 == 0, n=1 + number % 2)
        assert answer.status_code == 200

    for number in range(20):
        await once(number)
    tasks, files = len(asyncio.all_tasks()), open_files()
    gc.collect()
    for number in range(200):
        await once(number)
    gc.collect()
    await until(lambda: len(asyncio.all_tasks()) <= tasks, 60.0, "no task is left")
    await until(lambda: open_files() <= files + 1, 60.0, "no file is left")
    assert gateway.chooser.open == 0
    assert rack.engines[0].running == 0
