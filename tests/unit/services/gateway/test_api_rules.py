"""Rules that conformance suites assert, where no other test here proves them.

docs/invariants.md lists the others.
"""

import json

import pytest

from tandem_engine.config import Role
from tandem_testing.gateway_builders import EngineRack, events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "complete"])
POSTS = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"model": "mock", "prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"model": "mock", "input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"model": "mock", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


def ask(gateway, endpoint: str, **fields):
    return getattr(gateway, endpoint)(**fields)


def shown(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


# [stream-shape]


@ENDPOINTS
@pytest.mark.parametrize("n", [1, 3])
async def test_stream_has_one_id_one_finish_per_choice_and_usage_last(gateway, endpoint, n):
    fields = {"n": n, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await ask(gateway, endpoint, **fields))
    assert len({(chunk["id"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * n
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    finished = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(finished) == [*range(n)]
    for index in range(n):
        *before, last = [choice for choice in choices if choice["index"] == index]
        assert last["finish_reason"] == "length"
        if endpoint == "chat":
            assert before[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            assert not any("role" in choice["delta"] for choice in [*before[1:], last])


# [stream-equals-whole]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["one", "two"], "n": 2}, {"echo": True}], ids=str)
async def test_greedy_streamed_completion_equals_non_streamed(gateway, fields):
    fields = {"prompt": "hi", "temperature": 0, "seed": 1, "max_tokens": 6, **fields}
    whole = (await gateway.complete(**fields)).json()["choices"]
    chunks = events(await gateway.complete(stream=True, **fields))
    for choice in whole:
        parts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(parts) == choice["text"]


# [usage-adds-up]


@ENDPOINTS
async def test_usage_adds_up(gateway, endpoint):
    usage = (await ask(gateway, endpoint, n=3, max_tokens=5)).json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 15


# [stop-strings]


ONE_TOKEN_OUTPUTS = {
    "EOS": ("", {}, None),
    "a stop token": (".", {"stop_token_ids": ["."]}, "."),
    "a stop string": (".", {"stop": "."}, "."),
}


@pytest.mark.parametrize("disaggregated", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "fields", "reason"), ONE_TOKEN_OUTPUTS.values(), ids=ONE_TOKEN_OUTPUTS.keys())
async def test_output_may_end_with_its_first_token(tokenizer, disaggregated, stream, text, fields, reason):
    [dot] = tokenizer.encode(".")
    fields = {name: [dot] if name == "stop_token_ids" else value for name, value in fields.items()}
    reason = dot if "stop_token_ids" in fields else reason
    token = scripted_tokens([*script(tokenizer, text, eos=EOS), *[EOS] * 9])
    with EngineRack() as rack:
        for role in (Role.PREFILL, Role.DECODE) if disaggregated else (Role.BOTH,):
            rack.add(role.value, MockBehavior(token=token, eos=EOS), role)
        async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
            options = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await gateway.complete(max_tokens=9, stream=stream, **fields, **options)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == ""
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", reason)
    assert chunks[-1]["usage"]["completion_tokens"] == 1


async def test_stop_fields_reach_the_engine(gateway, rack):
    fields = {"min_tokens": 2, "ignore_eos": True, "stop": ["a", "b"], "stop_token_ids": [7]}
    assert (await gateway.complete(max_tokens=4, **fields)).status_code == 200
    sampling = rack.engines[0].received[0].sampling
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop, sampling.stop_token_ids) == (
        2,
        True,
        ("a", "b"),
        (7,),
    )


# [logit-bias]


BIASES = [
    ({"x": 1, "5": 1, "1.5": 2, "": 3}, ["logit_bias", "x", "1.5"]),
    ({"999999": 1}, ["logit_bias", "999999", "{vocab_size}"]),
    ({"-1": 1}, ["logit_bias", "-1", "{vocab_size}"]),
    ({f"k{i}": 1 for i in range(9)}, ["k0", "k7", "and 1 more"]),
    ({"5": "a"}, ["logit_bias"]),
    ({"5": None}, ["logit_bias"]),
]


@ENDPOINTS
@pytest.mark.parametrize(("bias", "words"), BIASES, ids=lambda value: json.dumps(value)[:40])
async def test_bad_logit_bias_names_what_is_bad(gateway, rack, tokenizer, endpoint, bias, words):
    answer = await ask(gateway, endpoint, logit_bias=bias)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith("logit_bias")
    for word in words:
        assert word.format(vocab_size=tokenizer.vocab_size) in error["message"]
    assert not rack.engines[0].received


# [unknown-model]


@pytest.mark.parametrize(
    ("model", "status", "kind", "error_message"),
    [
        ("other", 404, "NotFoundError", "'other'"),
        ("../../etc/passwd", 404, "NotFoundError", "'../../etc/passwd'"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unknown_model_is_a_404(gateway, path, model, status, kind, error_message):
    answer = await gateway.http.post(path, json={**POSTS[path], "model": model})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, kind, "model")
    assert error_message in error["message"]


# [unknown-fields]


UNKNOWN = {"made_up": 1, "also_made_up": {"a": []}}


@pytest.mark.parametrize("path", POSTS)
async def test_unknown_fields_are_ignored_or_with_strict_fields_named(gateway, rack, tokenizer, path):
    body = POSTS[path]
    assert (await gateway.http.post(path, json={**body, **UNKNOWN})).status_code == 200
    async with live_gateway(rack.context, tokenizer, rack.engines, strict_fields=True) as strict:
        assert (await strict.http.post(path, json=body)).status_code == 200
        served = len(rack.engines[0].received)
        answer = await strict.http.post(path, json={**body, **UNKNOWN})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "also_made_up")
    assert error["message"] == "unknown fields: also_made_up, made_up"
    assert len(rack.engines[0].received) == served


# [known-fields]


HARMLESS = {
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "session_id": "s",
    "request_id": "r",
    "user": "u",
    "metadata": {"a": "b"},
}
OF_CHATS = {"verbosity": "low", "modalities": ["text"], "stream_options": None}
OF_RESPONSES = {"stream_options": {"include_obfuscation": False}, "text": {"verbosity": "low"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, HARMLESS | OF_CHATS), (COMPLETIONS, HARMLESS | OF_CHATS), ("/v1/responses", HARMLESS | OF_RESPONSES)],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_neutral_fields_of_official_clients_are_accepted(rack, tokenizer, path, fields):
    rack.add("solo", MockBehavior(token=scripted_tokens([5, 6, EOS]), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines, strict_fields=True) as strict:
        for name, value in fields.items():
            answer = await strict.http.post(path, json={**POSTS[path], name: value})
            assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"moderation": {"model": "m"}}, "moderation"),
        (COMPLETIONS, {"moderation": {"model": "m"}}, "moderation"),
        ("/v1/responses", {"moderation": {"model": "m"}}, "moderation"),
        ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
        (CHAT, {"prompt_cache_key": "k" * 513}, "prompt_cache_key"),
        ("/v1/responses", {"session_id": "s" * 513}, "session_id"),
    ],
)
async def test_unsupported_effective_field_is_rejected_by_name(gateway, rack, path, fields, param):
    answer = await gateway.http.post(path, json={**POSTS[path], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not rack.engines[0].received


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, ""),
        ({"user": "u"}, "u"),
        ({"user": "u", "prompt_cache_key": "k"}, "k"),
        ({"user": "u", "prompt_cache_key": "k", "session_id": "s"}, "s"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_session_key_of_a_request_reaches_the_router(gateway, path, fields, key):
    assert (await gateway.http.post(path, json={**POSTS[path], **fields})).status_code == 200
    assert gateway.chooser.queries[-1].session_key == key


# [output-limit]


@pytest.mark.parametrize(
    ("endpoint", "fields", "tokens"),
    [
        ("chat", {"max_tokens": 3}, 3),
        ("chat", {"max_completion_tokens": 4}, 4),
        ("chat", {"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ("complete", {"max_tokens": 3}, 3),
        ("complete", {"max_tokens": 0, "echo": True}, 0),
        ("complete", {"max_tokens": 0}, 0),
        ("chat", {"max_tokens": 0}, 0),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 0}, 0),
    ],
)
async def test_either_name_of_the_limit_holds_and_the_newer_wins(gateway, endpoint, fields, tokens):
    answer = await ask(gateway, endpoint, ignore_eos=True, **fields)
    assert answer.json()["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"max_tokens": -1}, "max_tokens"),
        ("chat", {"max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("complete", {"max_tokens": -1}, "max_tokens"),
        ("complete", {"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
async def test_negative_output_limit_is_refused(gateway, rack, endpoint, fields, param):
    answer = await ask(gateway, endpoint, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not rack.engines[0].received


# [structured-output]


@pytest.mark.parametrize("stream", [False, True])
async def test_json_that_max_tokens_cuts_off_says_so(tokenizer, stream):
    token = scripted_tokens(script(tokenizer, '{"a": [1, 2, 3]}', eos=EOS))
    with EngineRack() as rack:
        rack.add("solo", MockBehavior(token=token, eos=EOS))
        async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
            fields = {"response_format": {"type": "json_object"}, "stream": stream}
            answers = [await gateway.complete(max_tokens=limit, **fields) for limit in (4, 99)]
    texts = []
    for answer in answers:
        choices = [c for chunk in events(answer) for c in chunk["choices"]] if stream else answer.json()["choices"]
        texts.append(("".join(map(shown, choices)), choices[-1]["finish_reason"]))
    assert texts[0][1] == "length"
    assert texts[1] == ('{"a": [1, 2, 3]}', "stop")


# [choices-bounded]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"n": 3, "temperature": 0}, 200),
        ({"n": 2, "best_of": 4}, 200),
        ({"n": 2, "best_of": 2, "stream": True}, 200),
        ({"n": 129}, 400),
        ({"n": 2, "best_of": 1}, 400),
        ({"best_of": 2, "stream": True}, 400),
    ],
    ids=str,
)
async def test_n_and_best_of(gateway, rack, fields, status):
    answer = await gateway.complete(max_tokens=1, **fields)
    assert answer.status_code == status
    if status == 200 and "stream" not in fields:
        assert [choice["index"] for choice in answer.json()["choices"]] == [*range(fields["n"])]
    assert len(rack.engines[0].received) == (0 if status == 400 else fields.get("best_of", fields["n"]))


# [response-ids]


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETIONS, "cmpl-"), ("/v1/responses", "resp_")])
async def test_response_id_has_endpoint_prefix_and_request_id(gateway, path, prefix):
    answer = await gateway.http.post(path, json=POSTS[path])
    assert answer.json()["id"] == prefix + answer.headers["x-request-id"]
    missing = await gateway.http.post(path, json={})
    assert missing.status_code == 400
    assert missing.headers["x-request-id"]


ANTHROPIC = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("head", "body", "known_as"),
    [({}, "mine", "mine"), ({"X-Request-Id": "theirs"}, "mine", "theirs"), ({}, "no id\n", None), ({}, "", None)],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
async def test_body_may_name_its_request_where_the_head_does_not(gateway, path, head, body, known_as):
    fields = ANTHROPIC if path == "/v1/messages" else POSTS[path]
    answer = await gateway.http.post(path, json={**fields, "request_id": body}, headers=head)
    assert answer.status_code == 200
    if known_as is None:
        assert answer.json()["id"].endswith(answer.headers["x-request-id"])
        return
    assert answer.headers["x-request-id"] == known_as
    record = (await gateway.http.get(f"/v1/requests/{known_as}/explain")).json()
    assert (record["endpoint"], record["client_request_id"]) == (path, known_as)


# [errors-in-place]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("fields", [{"top_k": -5}, {"model": "other"}, {"n": 0}, {"max_tokens": 10_000}], ids=str)
async def test_error_before_the_first_chunk_is_a_status(gateway, endpoint, fields):
    answer = await ask(gateway, endpoint, stream=True, **fields)
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
