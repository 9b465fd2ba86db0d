"""Rows of bad and strange input where no other test here proves them: what is answered, what is named, and that nothing
of a refused request reaches an engine.

docs/invariants.md lists the others.
"""

import asyncio
import json
import re
import socket
import unicodedata

import httpx
import pytest
import pytest_asyncio

from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest
from tandem_testing.gateway_builders import EngineRack, events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOUND = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"model": "mock", "prompt": "a", "max_tokens": 1},
}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture(scope="module")
def engines():
    with EngineRack() as engines:
        engines.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
        yield engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines, tokenizer):
    async with live_gateway(engines.context, tokenizer, engines.engines) as live:
        yield live


@pytest.fixture
def engine(engines):
    engines.engines[0].received.clear()
    return engines.engines[0]


async def send(gateway, path: str, body: bytes | dict, **headers: str):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await gateway.http.post(path, content=content, headers=headers)


def refusal(answer, status: int = 400) -> dict:
    """The error, whose shape is checked."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    return error


# bodies


BODIES = [
    (b"", "request body is empty"),
    (b'{"model": "mock"} x', "not valid JSON.*byte 1[89]"),
    (b'{"model" "mock"}', "not valid JSON.*byte 9"),
    (b"{}{}", "not valid JSON.*byte [23]"),
    (b'{"model": "mock"', "not valid JSON.*truncated"),
    (b"[]", "must be a JSON object.*array"),
    (b'"x"', "must be a JSON object.*str"),
    (b"1", "must be a JSON object.*int"),
    (b"null", "must be a JSON object.*null"),
    (b"true", "must be a JSON object.*bool"),
    (b'{"prompt": "\xff"}', "not valid UTF-8"),
    (b'{"made_up": "\xff"}', "not valid UTF-8"),
    ('{"model": "mock"}'.encode("utf-16"), "not valid UTF-8"),
    (b'{"x": ' + b"[" * 100_000, "nested deeper than 64"),
    (b'{"temperature": NaN}', r"not a finite number \(byte 16\)"),
    (b'{"temperature": Infinity}', "not a finite number"),
    (b'{"temperature": -Infinity}', "not a finite number"),
    (b'{"temperature": 1e999}', "temperature: .*not a finite number"),
    (b'{"temperature": nothing}', "malformed: invalid character"),
    (b'{"seed": ' + b"9" * 10_000 + b"}", "seed: integer value out of range"),
    (b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}", "more than 100000"),
    (b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}", "more than 100000"),
]


@BOTH
@pytest.mark.parametrize(("body", "message"), BODIES, ids=lambda value: str(value)[:25])
async def test_malformed_request_body_error_names_the_reason(gateway, engine, path, body, message):  # [body-is-json]
    assert re.search(message, refusal(await send(gateway, path, body))["message"])
    assert not engine.received


@BOTH
async def test_bomb_in_another_encoding_is_not_unpacked(gateway, engine, path):  # [body-is-json]
    for encoding in ("gzip", "deflate", "br", "zstd", "made-up", "gzip, identity"):
        answer = await send(gateway, path, b"\x1f\x8b" + bytes(1000), **{"Content-Encoding": encoding})
        assert "Content-Encoding" in refusal(answer, 415)["message"]
    assert not engine.received


@BOTH
async def test_long_url_is_refused_before_the_body_is_read(gateway, path):  # [heads-bounded]
    answer = await gateway.http.post(f"{path}?{'x' * 60_000}", json=SOUND[path])
    refusal(answer, 414)


# fields


WRONG_TYPES = {  # [bad-field-named]
    "model": 5,
    "stream": "yes",
    "stream_options": True,
    "max_tokens": "5",
    "n": True,
    "temperature": [],
    "top_p": "high",
    "top_k": 1.5,
    "seed": "x",
    "stop": {},
    "logit_bias": "x",
    "user": 5,
    "metadata": [],
    "ignore_eos": 1,
    "timeout": "soon",
    "response_format": "json",
}


@BOTH
@pytest.mark.parametrize("field", WRONG_TYPES)
async def test_value_of_the_wrong_type_is_named(gateway, engine, path, field):  # [bad-field-named]
    error = refusal(await send(gateway, path, {**SOUND[path], field: WRONG_TYPES[field]}))
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: expected ")
    assert not engine.received


@pytest.mark.parametrize(("path", "shape"), [(CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)])
async def test_null_is_absent_for_each_field_in_turn(gateway, path, shape):  # [null-is-absent]
    optional = set(shape.__struct_encode_fields__) - SOUND[path].keys()
    for field in sorted(optional):
        answer = await send(gateway, path, {**SOUND[path], field: None})
        assert answer.status_code == 200, (field, answer.text)


@BOTH
@pytest.mark.parametrize("field", ["messages", "prompt"])
async def test_null_is_absent_for_what_is_required_too(gateway, engine, path, field):  # [null-is-absent]
    if field not in SOUND[path]:
        return
    for body in ({**SOUND[path], field: None}, {k: v for k, v in SOUND[path].items() if k != field}):
        assert refusal(await send(gateway, path, body))["param"] == field
    assert not engine.received


@BOTH
async def test_nul_and_lone_surrogates_are_text_or_a_400(gateway, engine, path):  # [nul-is-text] [bad-field-named]
    assert "a\\x00b" in refusal(await send(gateway, path, {**SOUND[path], "model": "a\x00b"}), 404)["message"]
    assert (await send(gateway, path, {**SOUND[path], "stop": "\x00"})).status_code == 200
    assert engine.received[0].sampling.stop == ("\x00",)
    for field in ("model", "user", "stop", "cache_salt"):
        body = json.dumps({**SOUND[path], field: "LONE"}).replace('"LONE"', '"a\\ud800b"').encode()
        refusal(await send(gateway, path, body))


# parameters


PROMPTS = [  # [token-id-prompts]
    ("", "prompt must not be empty"),
    ([], "prompt must not be empty"),
    ([[]], r"prompt\[0\] must not be empty"),
    (["a", ""], r"prompt\[1\] must not be empty"),
    ([1, "a"], r"prompt\[0\]: token ids and texts"),
    ([1.5], r"prompt\[0\]: expected int or str"),
    ([True], r"prompt\[0\]: expected int or str"),
    ([-1], r"prompt\[0\]: token id -1 is out of vocabulary, ids are 0 to "),
    ([5, 400], r"prompt\[1\]: token id 400 is out of vocabulary"),
    ([2**63], r"prompt\[0\]: token id 9223372036854775808 is out of vocabulary"),
    ([[5], [6, 400]], r"prompt\[1\]\[1\]: token id 400 is out of vocabulary"),
    (["a"] * 1025, "at most 1024 prompts, got 1025"),
    (["a"] * 129, "at most 128, got 1 . 129"),
    ([5] * 512, "maximum context length is 512 tokens"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=lambda value: str(value)[:25])
async def test_invalid_prompt_error_names_position_and_limit(gateway, engine, prompt, message):  # [token-id-prompts]
    error = refusal(await gateway.complete(prompt, max_tokens=1))
    assert re.search(message, error["message"])
    assert error["param"] in ("prompt", "prompt[0]", "n")
    assert not engine.received


async def test_invalid_embedding_input_error_names_position(gateway, engine):  # [token-id-prompts]
    body = {"model": "mock", "input": [[5], [6, 400]]}
    error = refusal(await gateway.http.post("/v1/embeddings", json=body))
    assert (error["param"], error["message"].partition(":")[0]) == ("input", "input[1][1]")
    assert not engine.received


EDGES = [
    ({"temperature": 1e-12}, lambda sampling: sampling.greedy),
    ({"temperature": 2}, lambda sampling: sampling.temperature == 2),
    ({"top_k": -1}, lambda sampling: sampling.top_k == 0),
    ({"top_k": 0}, lambda sampling: sampling.top_k == 0),
    ({"top_p": 1}, lambda sampling: sampling.top_p == 1),
    ({"seed": -(2**63)}, lambda sampling: sampling.seed == -(2**63)),
    ({"min_tokens": 1, "stop_token_ids": [7]}, lambda sampling: sampling.min_tokens == 1),
    ({"stop": " \n"}, lambda sampling: sampling.stop == (" \n",)),
    ({"stop": ["a"] * 4}, lambda sampling: len(sampling.stop) == 4),
]


@BOTH
@pytest.mark.parametrize(("fields", "holds"), EDGES, ids=[str(fields)[:30] for fields, _ in EDGES])
async def test_last_good_value_is_good(gateway, engine, path, fields, holds):  # [bad-field-named]
    assert (await send(gateway, path, {**SOUND[path], **fields})).status_code == 200
    assert holds(engine.received[0].sampling)


async def test_prompt_may_end_with_a_stop_string(gateway, engine):  # [bad-field-named]
    plain = (await gateway.complete("hello", max_tokens=4, seed=1)).json()["choices"][0]
    stopped = (await gateway.complete("hello", max_tokens=4, seed=1, stop="lo")).json()["choices"][0]
    assert stopped["text"] == plain["text"]


async def test_equal_request_ids_at_once_are_two_requests(gateway, engine):  # [request-ids-apart]
    headers = {"X-Request-Id": "same"}
    bodies = [{"model": "mock", "prompt": text, "max_tokens": 6, "seed": 1} for text in ("one", "two")]
    alone = [(await gateway.http.post(COMPLETIONS, json=body)).json()["choices"][0]["text"] for body in bodies]
    asked = (gateway.http.post(COMPLETIONS, json=body, headers=headers) for body in bodies * 4)
    together = await asyncio.gather(*asked)
    assert [answer.json()["choices"][0]["text"] for answer in together] == alone * 4
    assert len({request.rid for request in engine.received}) == 10
    assert {answer.headers["x-request-id"] for answer in together} == {"same"}


@BOTH
async def test_client_names_no_peer_and_no_upstream(gateway, engine, path, monkeypatch):  # [client-names-nothing]
    for field in ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
        assert refusal(await send(gateway, path, {**SOUND[path], field: "10.0.0.1"}))["param"] == field
    assert not engine.received
    await gateway.http.get("/live")
    resolved: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: resolved.append(args) or [])
    upstream = {"api_base": "http://169.254.169.254", "base_url": "http://10.0.0.1", "extra_headers": {"a": "b"}}
    assert (await send(gateway, path, {**SOUND[path], **upstream})).status_code == 200
    assert not resolved


PARTS = ["image_url", "input_audio", "file", "video_url", "image_embeds"]


@pytest.mark.parametrize("kind", PARTS)
async def test_media_are_refused_and_never_fetched(gateway, engine, monkeypatch, kind):  # [media-refused]
    await gateway.http.get("/live")
    resolved: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: resolved.append(args) or [])
    part = {"type": kind, kind: {"url": "http://media.example/x", "file_id": "file:///etc/passwd"}}
    error = refusal(await gateway.chat("", messages=[{"role": "user", "content": [part]}]))
    assert error["param"] == "messages[0].content[0]"
    assert not resolved
    assert not engine.received


# text


STOPS = [  # [stop-strings]
    ("aaab and more", "aab", "a"),
    ("go \U0001f389\U0001f389 on", "\U0001f389\U0001f389", "go "),
    ("caf\u00e9 noir", "\u00e9 n", "caf"),
    ("abcabd", "abd", "abc"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_output", [1, 4])
@pytest.mark.parametrize(("text", "stop", "shown"), STOPS)
async def test_stop_string_cuts_where_it_begins(tokenizer, text, stop, shown, stream, tokens_per_output):
    token = scripted_tokens(script(tokenizer, text, eos=EOS))
    with EngineRack() as rack:
        rack.add("solo", MockBehavior(token=token, eos=EOS, tokens_per_output=tokens_per_output))
        async with live_gateway(rack.context, tokenizer, rack.engines) as live:
            answer = await live.complete(max_tokens=99, stop=stop, stream=stream)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == shown
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


async def test_marks_by_the_thousand_are_whole_in_a_stream(tokenizer):  # [whole-characters]
    text = "e" + "\u0301\u0316" * 1000
    token = scripted_tokens(script(tokenizer, text, eos=EOS))
    with EngineRack() as rack:
        rack.add("solo", MockBehavior(token=token, eos=EOS)).context_length = 1 << 20
        async with live_gateway(rack.context, tokenizer, rack.engines) as live:
            chunks = events(await live.complete(max_tokens=1 << 16, stream=True))
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_composed_and_decomposed_text_are_two_prompts(gateway, engine):  # [text-not-normalized]
    for form in ("NFC", "NFD"):
        assert (await gateway.complete(unicodedata.normalize(form, "caf\u00e9"), max_tokens=1)).status_code == 200
    composed, decomposed = engine.received
    assert composed.input_ids != decomposed.input_ids


@pytest.mark.parametrize(
    "text",
    [" " * 1_000_000, "x" * 1_000_000, "\n" * 1_000_000, bytes(range(256)).decode("latin-1") * 4000],
    ids=["spaces", "letters", "lines", "bytes"],
)
async def test_million_characters_are_a_400(gateway, engine, text):  # [long-text-off-loop]
    for answer in (await gateway.complete(text), await gateway.chat(text)):
        assert refusal(answer)["code"] == "context_length_exceeded"
    assert not engine.received


# clients that leave


async def test_client_may_leave_at_any_chunk_and_twice(gateway, engine):  # [client-leaves-aborts]
    body = {"model": "mock", "prompt": "hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
    for chunks in (0, 1, 5):
        for _ in range(2):
            async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.aiter_lines()
                for _ in range(chunks):
                    # Tokens that wait for a busy client share a chunk: there may be fewer.
                    await anext(lines, None)
    assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.received) == 6 and engine.running == 0)
    await until(lambda: gateway.chooser.open == 0, 20.0, "every reservation is given back")
    assert (await gateway.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_abandoned_requests_do_not_block_the_next_one(gateway, engine, stream):  # [client-leaves-aborts]
    """Two hundred long requests are asked for and left; the next one is answered, and nothing runs on."""
    body = {"model": "mock", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "min_tokens": 400, "stream": stream}
    engine.behavior.mute = True
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60.0) as crowd:
        asking = [asyncio.create_task(crowd.post(COMPLETIONS, json=body)) for _ in range(200)]
        assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.received) == 200)
        for request in asking:
            request.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert await asyncio.to_thread(engine.wait_until, lambda: engine.running == 0)
    engine.behavior.mute = False
    assert (await gateway.complete(max_tokens=1)).status_code == 200
    await until(lambda: gateway.chooser.open == 0, 20.0, "every reservation is given back")
    assert len(engine.received) == 201


async def test_unattainable_deadlines_leak_no_reservation_or_task(gateway, engine):  # [deadlines-hold]
    engine.behavior.mute = True
    tasks = len(asyncio.all_tasks())
    for number in range(10):
        body = {**SOUND[COMPLETIONS], "timeout": 0.001, "stream": number % 2 == 0, "n": 1 + number % 3}
        answers = await asyncio.gather(*[gateway.http.post(COMPLETIONS, json=body) for _ in range(30)])
        assert {answer.status_code for answer in answers} == {504}
    assert await asyncio.to_thread(engine.wait_until, lambda: engine.running == 0)
    engine.behavior.mute = False
    assert (await gateway.complete(max_tokens=1)).status_code == 200
    await until(lambda: gateway.chooser.open == 0, 20.0, "every reservation is given back")
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 1, 20.0, "no task is left")
