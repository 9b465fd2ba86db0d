"""`POST /v1/messages`: what a request means, what its answer looks like, and in which order its events come."""

import msgspec
import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import live_gateway, script
from tandem_testing.key_files import bearer, key_of, write_keys
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
CALL = 'Hm.\n<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("messages"), chat_template=THINKING_CHATML))


@pytest.fixture
def says(thinking, rack):
    """A gateway in front of an engine that always writes the same text."""

    def start(text: str, *, config: dict | None = None, **behavior):
        ids = script(thinking, text, eos=EOS)
        rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS, **behavior)).context_length = 4096
        return live_gateway(rack.context, thinking, rack.engines, recovery_s=0.1, **(config or {}))

    return start


async def ask(gateway, path: str = "/v1/messages", headers: dict | None = None, **fields):
    body = {"model": "mock", "max_tokens": 200, "messages": HI, **fields}
    return await gateway.http.post(path, json=body, headers=headers or {})


def named_events(response) -> list[dict]:
    """Events of a streamed answer; each is named as its document says."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def order(found: list[dict]) -> list[str]:
    """Types of events, those that follow their like left out."""
    types = [event["type"] for event in found]
    return [kind for kind, before in zip(types, [None, *types], strict=False) if kind != before]


def prompts(gateway, rack) -> list[str]:
    """What the engine was asked, as text."""
    asked = [request.input_ids for request in rack.engines[0].received]
    return [gateway.tokenizer.decode(ids, skip_special_tokens=False) for ids in asked]


# What is answered


async def test_text_is_answered(says):
    async with says("hello there") as gateway:
        response = await ask(gateway)
        explained = await gateway.http.get(f"/v1/requests/{response.json()['id']}/explain")
    answer = response.json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "mock")
    assert answer["content"] == [{"type": "text", "text": "hello there"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert explained.json()["endpoint"] == "/v1/messages"


async def test_tokens_found_in_a_cache_are_no_input_tokens(says):
    async with says("hello there", cached_tokens=5) as gateway:
        answer = (await ask(gateway)).json()
        prompt = (await ask(gateway, "/v1/messages/count_tokens")).json()["input_tokens"]
    usage = answer["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (5, 0)
    assert usage["input_tokens"] == prompt - 5
    assert usage["output_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({"max_tokens": 3}, "max_tokens", None), ({"stop_sequences": ["there", "x"]}, "stop_sequence", "there")],
)
async def test_answer_says_why_it_ended(says, fields, reason, sequence):
    async with says("hello there you") as gateway:
        whole = (await ask(gateway, **fields)).json()
        streamed = named_events(await ask(gateway, stream=True, **fields))
    [delta] = [event["delta"] for event in streamed if event["type"] == "message_delta"]
    for ended in (whole, delta):
        assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, sequence)


async def test_thinking_text_and_calls_are_blocks_of_their_own(says):
    async with says(f"<think>\nRain?\n</think>\n{CALL}") as gateway:
        answer = (await ask(gateway, tools=[WEATHER])).json()
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Rain?", "signature": ""}
    assert text == {"type": "text", "text": "Hm."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern"})
    assert call["id"].startswith("toolu_")
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_truncated_tool_call_is_left_out_of_the_message(says):
    async with says(CALL.replace('"Bern"', '"Bern, the capital of Switzerland, on the river Aare"')) as gateway:
        answer = (await ask(gateway, tools=[WEATHER], max_tokens=60)).json()
    assert answer["stop_reason"] == "max_tokens"
    assert [block["type"] for block in answer["content"]] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_call_without_readable_input_has_no_block(says, stream):
    text = 'Hm.<tool_call>{"name": "weather" oops</tool_call>'
    async with says(text) as gateway:
        response = await ask(gateway, tools=[WEATHER], stream=stream)
    if stream:
        found = named_events(response)
        kinds = {event["content_block"]["type"] for event in found if event["type"] == "content_block_start"}
        reason = found[-2]["delta"]["stop_reason"]
    else:
        answer = response.json()
        kinds, reason = {block["type"] for block in answer["content"]}, answer["stop_reason"]
    assert (kinds, reason) == ({"text"}, "end_turn")


async def test_input_that_is_not_json_is_never_an_empty_object(says):
    text = 'Hm.<tool_call>{"name": "weather", "arguments": {"city": Bern}}</tool_call>'
    async with says(text) as gateway:
        block = (await ask(gateway, tools=[WEATHER])).json()["content"][-1]
    assert block["input"] == {"INVALID_JSON": '{"city": Bern}'}


# Streams


async def test_events_come_in_the_official_order(says):
    async with says(f"<think>\nRain?\n</think>\n{CALL}") as gateway:
        response = await ask(gateway, tools=[WEATHER], stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    found = named_events(response)
    assert order(found) == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["cache_read_input_tokens"]) == ([], None, 4)
    heads = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [head["type"] for head in heads] == ["thinking", "text", "tool_use"]
    assert (heads[2]["name"], heads[2]["input"]) == ("weather", {})


@pytest.mark.parametrize("tokens_per_output", [1, 9, 1000])
async def test_deltas_add_up_to_the_blocks_of_the_whole_answer(says, tokens_per_output):
    async with says(f"<think>\nRain?\n</think>\n{CALL}", tokens_per_output=tokens_per_output) as gateway:
        whole = (await ask(gateway, tools=[WEATHER])).json()
        found = named_events(await ask(gateway, tools=[WEATHER], stream=True))
    texts = ["", "", ""]
    for event in found:
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            [text] = event["delta"].values()
            assert kind == ("thinking_delta", "text_delta", "input_json_delta")[event["index"]]
            texts[event["index"]] += text
    assert texts == ["Rain?", "Hm.", '{"city": "Bern"}']
    assert found[-2]["usage"] == whole["usage"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


async def test_messages_stream_without_workers_ends_with_error_event(says):
    async with says("hello there you all", die_after=4) as gateway:
        found = named_events(await ask(gateway, stream=True, timeout=30))
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] in ("api_error", "overloaded_error", "timeout_error")
    assert "message_stop" not in {event["type"] for event in found}


# What a request means


async def test_messages_request_equals_the_equivalent_chat_request(says, rack):
    call = {"id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Bern."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", **call},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?\nIn Bern."},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "Well?"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["input_schema"]}}
    shared = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "max_tokens": 9}
    async with says("ok") as gateway:
        mine = await ask(
            gateway,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            tools=[WEATHER],
            stop_sequences=["X"],
            **shared,
        )
        body = {"model": "mock", "messages": chat, "tools": [tool], "stop": ["X"], **shared}
        theirs = await gateway.http.post("/v1/chat/completions", json=body)
        assert (mine.status_code, theirs.status_code) == (200, 200), mine.text
    first, second = rack.engines[0].received
    assert first.input_ids == second.input_ids
    assert first.sampling == second.sampling


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "auto"}, None),
        ({"type": "any"}, GrammarKind.JSON_SCHEMA),
        ({"type": "tool", "name": "weather"}, GrammarKind.JSON_SCHEMA),
    ],
)
async def test_tool_choice_is_held_to_by_a_grammar(says, rack, choice, kind):
    async with says("[]") as gateway:
        await ask(gateway, tools=[WEATHER], tool_choice=choice)
    grammar = rack.engines[0].received[0].sampling.grammar
    assert (None if grammar is None else grammar.kind) == kind


async def test_only_one_call_where_parallel_ones_are_not_wanted(says):
    text = f"{CALL}\n{CALL.removeprefix('Hm.')}"
    async with says(text) as gateway:
        both = (await ask(gateway, tools=[WEATHER])).json()["content"]
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = (await ask(gateway, tools=[WEATHER], tool_choice=choice)).json()["content"]
    assert [sum(block["type"] == "tool_use" for block in blocks) for blocks in (both, one)] == [2, 1]


async def test_no_tools_are_shown_when_none_may_be_used(says, rack):
    async with says("ok") as gateway:
        await ask(gateway, tools=[WEATHER], tool_choice={"type": "none"})
        await ask(gateway)
    first, second = rack.engines[0].received
    assert first.input_ids == second.input_ids


async def test_tool_result_error_is_marked_in_the_prompt(says, rack):
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no such city", "is_error": True}
    messages = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    async with says("ok") as gateway:
        assert (await ask(gateway, messages=messages, tools=[WEATHER])).status_code == 200
        assert "Error: no such city" in prompts(gateway, rack)[0]


async def test_thinking_is_switched_where_the_template_knows_how(says, rack):
    async with says("ok") as gateway:
        for thinking in (None, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
            assert (await ask(gateway, thinking=thinking)).status_code == 200
    default, enabled, disabled, adaptive = (request.input_ids for request in rack.engines[0].received)
    assert default == disabled == adaptive != enabled


async def test_output_can_be_held_to_a_schema(says, rack):
    async with says("{}") as gateway:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
        wanted = {"format": {"type": "json_schema", "schema": schema}}
        await ask(gateway, output_config=wanted)
        await ask(gateway, output_config=wanted, tools=[WEATHER])
    alone, with_tools = (request.sampling.grammar for request in rack.engines[0].received)
    assert alone.kind is GrammarKind.JSON_SCHEMA
    assert with_tools.kind is GrammarKind.STRUCTURAL_TAG
    assert msgspec.json.decode(with_tools.source)["answer"] == schema


async def test_counting_counts_what_the_model_would_see(says, rack):
    fields = {"system": "Be brief.", "tools": [WEATHER]}
    async with says("ok") as gateway:
        body = {"model": "mock", "messages": HI, **fields}
        counted = (await gateway.http.post("/v1/messages/count_tokens", json=body)).json()
        await ask(gateway, **fields)
    assert counted == {"input_tokens": len(rack.engines[0].received[0].input_ids)}


# What is refused

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
BAD = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens must be between 1"),
    ({"messages": []}, "messages must have at least one"),
    ({"messages": None}, "messages must have at least one"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": []}]}, r"messages[0].content must have"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: blocks of the type image"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]}, "come before any text"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "answers no tool call"),
    ({"system": [{"type": "image"}]}, "system[0]: blocks of the type image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: web_search_20250305"),
    ({"tools": [{"name": "weather"}]}, "tools[0].input_schema is required"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name must have"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name: there are two tools"),
    ({"tools": [{**WEATHER, "input_schema": {"type": 5}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names x"),
    ({"tool_choice": {"type": "any"}}, "tool_choice requires a call"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences takes at most"),
    ({"temperature": -1}, "temperature"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"output_config": {"effort": "low"}}, "output_config.effort is not supported"),
    ({"max_tokens": 5000}, "maximum context length is 4096"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD, ids=[str(n) for n in range(len(BAD))])
async def test_bad_input_is_an_invalid_request_that_names_the_field(says, rack, fields, sentence):
    async with says("ok") as gateway:
        response = await ask(gateway, **fields)
    document = response.json()
    assert (response.status_code, document["type"]) == (400, "error")
    assert document["error"]["type"] == "invalid_request_error"
    assert sentence in document["error"]["message"]
    assert document["request_id"] == response.headers["request-id"]
    assert not rack.engines[0].received


async def test_errors_have_anthropics_shape_on_its_routes_alone(says, tmp_path):
    keys = write_keys(tmp_path, ann={}, slow={"requests_per_minute": 1})
    async with says("ok", config={"api_keys": keys}) as gateway:
        ann = {"x-api-key": key_of("ann")}
        answers = {
            "authentication_error": await ask(gateway),
            "not_found_error": await ask(gateway, headers=ann, model="other"),
            "invalid_request_error": await gateway.http.get("/v1/messages", headers=ann),
        }
        await ask(gateway, headers={"x-api-key": key_of("slow")})
        answers["rate_limit_error"] = await ask(gateway, headers={"x-api-key": key_of("slow")})
        gateway.chooser.fleet.clear()
        other = await gateway.http.post("/v1/chat/completions", json={"model": "x", "messages": HI}, headers=ann)
    for kind, answer in answers.items():
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert [answers[kind].status_code for kind in answers] == [401, 404, 405, 429]
    assert other.json()["error"]["code"] == "model_not_found"


async def test_key_may_come_in_either_header_but_only_one_key(says, tmp_path):
    keys = write_keys(tmp_path, ann={}, bob={})
    async with says("ok", config={"api_keys": keys}) as gateway:
        headers = [
            {"x-api-key": key_of("ann"), "anthropic-version": "2023-06-01"},
            bearer("ann"),
            {**bearer("ann"), "x-api-key": key_of("ann")},
            {**bearer("ann"), "x-api-key": key_of("bob")},
            {"x-api-key": "a b"},
            {"x-api-key": "unknown"},
        ]
        statuses = [(await ask(gateway, headers=given)).status_code for given in headers]
        twice = [("x-api-key", key_of("ann")), ("x-api-key", key_of("ann"))]
        statuses.append((await gateway.http.get("/v1/models", headers=twice)).status_code)
        statuses.append((await gateway.http.get("/v1/models", headers=headers[0])).status_code)
    assert statuses == [200, 200, 200, 401, 401, 401, 401, 200]
