"""`POST /v1/responses`: what a request means, what its answer looks like, and in which order its events come."""

import json

import msgspec
import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import CHATML, EOS, THINKING_CHATML, write_tokenizer

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = 'Hm.\n<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture(scope="session")
def thinking(tmp_path_factory) -> TextTokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("responses-tokenizer"), chat_template=THINKING_CHATML)
    return TextTokenizer.load(folder)


@pytest.fixture
def says(thinking, rack):
    """A gateway in front of an engine that always writes the same text."""

    def start(text: str, **behavior):
        ids = script(thinking, text, eos=EOS)
        rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS, **behavior)).context_length = 4096
        return live_gateway(rack.context, thinking, rack.engines, ping_interval_s=2.0, recovery_s=0.1)

    return start


async def respond(gateway, **fields):
    return await gateway.http.post("/v1/responses", json={"model": "mock", "input": "hi", **fields})


def named_events(response) -> list[dict]:
    """Events of a streamed response; each is named as its document says, and they are numbered from 0."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def order(found: list[dict]) -> list[str]:
    """Types of events, those that follow their like left out."""
    types = [event["type"].removeprefix("response.") for event in found]
    return [kind for kind, before in zip(types, [None, *types], strict=False) if kind != before]


# What is answered


async def test_text_is_answered(says):
    async with says("hello there") as gateway:
        answer = (await respond(gateway, metadata={"a": "b"}, temperature=0.5)).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello there", "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (answer["metadata"], answer["temperature"], answer["store"]) == ({"a": "b"}, 0.5, False)


async def test_output_that_was_cut_is_incomplete(says):
    async with says("hello there") as gateway:
        whole = (await respond(gateway, max_output_tokens=3)).json()
        streamed = named_events(await respond(gateway, max_output_tokens=3, stream=True))
    for answer in (whole, streamed[-1]["response"]):
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["status"] == "incomplete"
    assert streamed[-1]["type"] == "response.incomplete"


async def test_reasoning_text_and_calls_are_items_of_their_own(says):
    async with says(f"<think>\nRain?\n</think>\n{CALL}") as gateway:
        answer = (await respond(gateway, tools=[WEATHER])).json()
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Rain?"}]
    assert message["content"][0]["text"] == "Hm."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Bern"}')
    assert call["call_id"].startswith("call_")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


# Streams


async def test_events_come_in_the_official_order(says):
    async with says(f"<think>\nRain?\n</think>\n{CALL}") as gateway:
        response = await respond(gateway, tools=[WEATHER], stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert order(named_events(response)) == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


@pytest.mark.parametrize("tokens_per_output", [1, 9, 1000])
async def test_deltas_add_up_to_the_items_of_the_whole_answer(says, tokens_per_output):
    async with says(f"<think>\nRain?\n</think>\n{CALL}", tokens_per_output=tokens_per_output) as gateway:
        whole = (await respond(gateway, tools=[WEATHER])).json()
        found = named_events(await respond(gateway, tools=[WEATHER], stream=True))
    texts = ["", "", ""]
    for event in found:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    assert texts == ["Rain?", "Hm.", '{"city": "Bern"}']
    final = found[-1]["response"]
    assert [_nameless(item) for item in final["output"]] == [_nameless(item) for item in whole["output"]]
    assert [e["item"] for e in found if e["type"] == "response.output_item.done"] == final["output"]
    assert final["usage"] == whole["usage"]


def _nameless(item: dict) -> dict:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


async def test_responses_stream_without_workers_ends_as_failed(says):
    async with says("hello there", die_after=3, step_s=0.01) as gateway:
        found = named_events(await respond(gateway, stream=True))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"


async def test_response_can_be_explained(says):
    async with says("hello") as gateway:
        answer = (await respond(gateway)).json()
        record = (await gateway.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    assert (record["endpoint"], record["status"]) == ("/v1/responses", 200)


# What a request means


async def test_items_mean_what_the_same_chat_means(says, rack, thinking):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Rain?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Genf"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "developer", "content": "be brief"},
    ]
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    calls = [("c1", '{"city": "Bern"}'), ("c2", '{"city": "Genf"}')]
    messages = [
        {"role": "system", "content": "You know the weather."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "Hm.",
            "reasoning_content": "Rain?",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "weather", "arguments": text}}
                for name, text in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "developer", "content": "be brief"},
    ]
    async with says("ok") as gateway:
        fields = {"input": items, "instructions": "You know the weather.", "tools": [WEATHER]}
        assert (await respond(gateway, **fields)).status_code == 200
        body = {"model": "mock", "messages": messages, "tools": [{"type": "function", "function": function}]}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
    as_response, as_chat = (request.input_ids for request in rack.engines[0].received)
    assert as_response == as_chat


async def test_form_of_a_text_is_a_grammar(says, rack):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    fields = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    async with says('{"a": 1}') as gateway:
        answer = (await respond(gateway, **fields)).json()
    grammar = rack.engines[0].received[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.source)) == (GrammarKind.JSON_SCHEMA, schema)
    assert answer["output"][0]["content"][0]["text"] == '{"a": 1}'
    assert answer["text"] == {"format": {"type": "json_schema", "name": "x", "schema": schema}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_call_can_be_required(says, choice):
    async with says('[{"name": "weather", "arguments": {}}]') as gateway:
        answer = (await respond(gateway, tools=[WEATHER], tool_choice=choice)).json()
    (item,) = answer["output"]
    assert (item["name"], item["arguments"]) == ("weather", "{}")


async def test_template_with_a_place_for_it_gets_the_effort(rack, tmp_path):  # [known-fields]
    knowing = TextTokenizer.load(write_tokenizer(tmp_path, chat_template="{{ reasoning_effort }}:" + CHATML))
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, knowing, rack.engines) as gateway:
        answer = (await respond(gateway, max_output_tokens=1, reasoning={"effort": "low", "summary": "auto"})).json()
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert knowing.decode(rack.engines[0].received[0].input_ids).startswith("low:")


# What is refused

REFUSED = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    ({"reasoning": {"max_tokens": "5"}}, "reasoning.max_tokens"),
    ({"reasoning": "high"}, "reasoning"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x", "call_id": "1"}]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
    ({"input": "x " * 9000}, "input"),
    ({"model": "other"}, "model"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: json.dumps(value)[:50])
async def test_unsupported_field_is_rejected_by_name(says, rack, fields, param, stream):
    async with says("ok") as gateway:
        answer = await respond(gateway, **{"stream": stream, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert not any(name in error["message"] for name in ("messages", "response_format", ".function."))
    assert rack.engines[0].received == []


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": "auto"}},
        {"service_tier": "auto", "prompt_cache_key": "x", "safety_identifier": "y", "text": {"verbosity": "low"}},
    ],
    ids=json.dumps,
)
async def test_neutral_values_are_accepted(says, fields):
    async with says("ok") as gateway:
        assert (await respond(gateway, **fields)).status_code == 200


async def test_response_with_tool_call_resumes_on_another_worker(thinking):  # [resume-from-tokens]
    ids = script(thinking, f"<think>\nRain?\n</think>\n{CALL}", eos=EOS)
    with EngineRack() as rack:
        rack.add("a", MockBehavior(token=scripted_tokens(ids), eos=EOS, die_after=len(ids) - 12))
        rack.add("b", MockBehavior(token=scripted_tokens(ids), eos=EOS))
        for engine in rack.engines:
            engine.context_length = 4096
        async with live_gateway(rack.context, thinking, rack.engines, ping_interval_s=2.0) as gateway:
            found = named_events(await respond(gateway, tools=[WEATHER], stream=True))
    assert len(rack.engines[1].received) == 1
    assert found[-1]["response"]["output"][2]["arguments"] == '{"city": "Bern"}'
