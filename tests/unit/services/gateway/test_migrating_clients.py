"""What clients of OpenAI, Anthropic, vLLM and SGLang send and read, on the routes of a gateway."""

import asyncio
import json
import re

import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.output.tool_parsers.registry import FAMILIES
from tandem_testing.gateway_builders import events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, TOOL_CHATML, write_tokenizer
from tandem_testing.waiting import until

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time"}}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
PATIENCE_S = 60.0
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
def start(rack, tmp_path):
    """A gateway in front of an engine that always writes the same text."""

    def start(text: str = "hello", template: str = THINKING_CHATML, **config):
        tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=template))
        ids = script(tokenizer, text, eos=EOS)
        rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS)).context_length = 4096
        return live_gateway(rack.context, tokenizer, rack.engines, **config)

    return start


async def post(gateway, path: str, **fields):
    response = await gateway.http.post(path, json={"model": "mock", **fields})
    assert response.status_code == 200, response.text
    return response


async def refusal(gateway, path: str, **fields) -> dict:
    response = await gateway.http.post(path, json={"model": "mock", **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt(gateway, rack) -> str:
    """What the engine computed last, as text."""
    return gateway.tokenizer.decode(rack.engines[0].received[-1].input_ids, skip_special_tokens=False)


# Tools


async def test_response_format_with_tools_allows_answer_or_call(start, rack):
    async with start('{"name": "Ada"}') as gateway:
        answer = await post(gateway, CHAT, messages=HI, tools=[WEATHER], response_format=FORMAT)
    spec = rack.engines[0].received[-1].sampling.grammar
    document = json.loads(spec.source)
    assert spec.kind is GrammarKind.STRUCTURAL_TAG
    assert document["answer"] == PERSON
    assert [structure["begin"] for structure in document["structures"]] == [
        '<tool_call>\n{"name": "weather", "arguments": '
    ]
    assert answer.json()["choices"][0]["message"]["content"] == '{"name": "Ada"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_call_beside_response_format_is_read_as_a_call(start, stream):
    async with start(CALL) as gateway:
        response = await post(gateway, CHAT, messages=HI, tools=[WEATHER], response_format=FORMAT, stream=stream)
    if stream:
        choices = [choice for chunk in events(response) for choice in chunk["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "weather"
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Bern"}
    else:
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


async def test_required_tool_choice_overrides_response_format(start, rack):
    async with start('[{"name": "weather", "arguments": {}}]') as gateway:
        fields = {"messages": HI, "tools": [WEATHER], "tool_choice": "required"}
        await post(gateway, CHAT, **fields)
        await post(gateway, CHAT, **fields, response_format=FORMAT)
    first, second = (request.sampling.grammar for request in rack.engines[0].received if request.input_ids)
    assert first == second


IN_JSON = {"gemma4", "hermes", "llama3_json"}
"""Parsers of families whose calls a grammar can describe beside an answer: JSON after a fixed beginning or mark."""

WITHOUT_CHANNELS = sorted(name for name, family in FAMILIES.items() if family.channels is None)
"""Others write answers and calls as messages on channels: test_gateway_channels.py."""


@pytest.mark.parametrize("parser", WITHOUT_CHANNELS)
async def test_format_with_tools_works_or_is_refused(start, rack, parser):
    fields = {"messages": HI, "tools": [WEATHER], "response_format": FORMAT}
    async with start('{"name": "Ada"}', tool_call_parser=parser) as gateway:
        if parser in IN_JSON:
            answer = await post(gateway, CHAT, **fields)
            message = answer.json()["choices"][0]["message"]
            assert (message["content"], message.get("tool_calls")) == ('{"name": "Ada"}', None)
            assert json.loads(rack.engines[0].received[-1].sampling.grammar.source)["answer"] == PERSON
        else:
            error = await refusal(gateway, CHAT, **fields)
            assert error["param"] == "response_format"
            assert (
                f"in the {parser} form of tool calls: set tool_choice to required, a name or none" in error["message"]
            )
        # What the sentence advises is served by every parser.
        await post(gateway, CHAT, **fields, tool_choice="none")


@pytest.mark.parametrize("parser", WITHOUT_CHANNELS)
async def test_format_with_forced_tools_works_for_every_parser(start, parser):
    fields = {"messages": HI, "tools": [WEATHER], "response_format": FORMAT}
    async with start('[{"name": "weather", "arguments": {"city": "Bern"}}]', tool_call_parser=parser) as gateway:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = await post(gateway, CHAT, **fields, tool_choice=choice)
            [call] = answer.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_shown(start, rack, mode):
    async with start(CALL, TOOL_CHATML) as gateway:
        await post(gateway, CHAT, messages=HI, tools=[WEATHER, TIME], tool_choice=allowed(mode, "weather"))
        limited = rack.engines[0].received[-1]
        await post(gateway, CHAT, messages=HI, tools=[WEATHER], tool_choice=mode)
        alone = rack.engines[0].received[-1]
    assert limited.input_ids == alone.input_ids
    assert limited.sampling.grammar == alone.sampling.grammar


async def test_allowed_tools_of_responses_mean_those_of_chats(start, rack):
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    async with start('[{"name": "weather", "arguments": {}}]', TOOL_CHATML) as gateway:
        answer = await post(gateway, RESPONSES, input="hi", tools=tools, tool_choice=choice)
        response = rack.engines[0].received[-1]
        await post(gateway, CHAT, messages=HI, tools=[WEATHER, TIME], tool_choice=allowed("required", "weather"))
    assert answer.json()["tool_choice"] == choice
    assert response.sampling.grammar == rack.engines[0].received[-1].sampling.grammar


@pytest.mark.parametrize("names", [(), ("other",), ("weather", "other")])
async def test_allowed_tools_that_are_not_there_are_refused(start, names):
    async with start() as gateway:
        error = await refusal(gateway, CHAT, messages=HI, tools=[WEATHER], tool_choice=allowed("auto", *names))
    assert error["param"] == "tool_choice"


# Variables of chat templates

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


async def test_effort_none_is_ignored_without_a_place(start, rack):
    async with start(template=PLAIN) as gateway:
        await post(gateway, CHAT, messages=HI)
        await post(gateway, CHAT, messages=HI, reasoning_effort="none")
        error = await refusal(gateway, CHAT, messages=HI, reasoning_effort="low")
    first, second = (request.input_ids for request in rack.engines[0].received if request.input_ids)
    assert first == second
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize(("effort", "switch"), [("none", "False"), ("high", "True"), ("max", "True")])
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
async def test_effort_switches_thinking_where_the_template_can(start, rack, effort, switch, name):
    async with start(template=PLAIN + "{{ " + name + " }}") as gateway:
        await post(gateway, CHAT, messages=HI, reasoning_effort=effort)
        assert prompt(gateway, rack).endswith(switch)
        await post(gateway, CHAT, messages=HI, reasoning_effort=effort, chat_template_kwargs={name: "mine"})
        assert prompt(gateway, rack).endswith("mine")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/tokenize"])
async def test_unknown_template_variables_reach_the_template(start, rack, path):
    beside = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    fields = beside | ({"max_tokens": 1} if path == MESSAGES else {})
    variables = {"style": {"tone": "dry", "steps": [1, 2]}, "unused": 1}
    async with start(template=PLAIN + "{{ style.tone }}{{ style.steps|length }}") as gateway:
        answer = await post(gateway, path, **fields, chat_template_kwargs=variables)
        ids = answer.json()["tokens"] if path == "/tokenize" else rack.engines[0].received[-1].input_ids
        assert gateway.tokenizer.decode(ids, skip_special_tokens=False).endswith("dry2")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "bos_token"])
async def test_template_variables_of_the_gateway_are_refused(start, name):
    async with start() as gateway:
        error = await refusal(gateway, CHAT, messages=HI, chat_template_kwargs={name: "x"})
    assert error["param"] == f"chat_template_kwargs.{name}"


async def test_control_tokens_in_template_variables_are_text(start, rack):
    async with start(template=PLAIN + "{{ note }}") as gateway:
        await post(gateway, CHAT, messages=HI, chat_template_kwargs={"note": "<|im_end|>"})
        assert prompt(gateway, rack).endswith("<|im_end|>")
    assert EOS not in rack.engines[0].received[-1].input_ids


# Bounds


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_more_than_four_stop_strings_are_accepted(start, rack, path):
    beside = {
        CHAT: {"messages": HI},
        COMPLETIONS: {"prompt": "a"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": HI},
    }
    stops = [f"s{number}" for number in range(16)]
    name = "stop_sequences" if path == MESSAGES else "stop"
    fields = {**beside[path], **({"max_tokens": 2} if path == MESSAGES else {})}
    async with start() as gateway:
        await post(gateway, path, **fields, **{name: stops})
        assert rack.engines[0].received[-1].sampling.stop == tuple(stops)
        error = await refusal(gateway, path, **fields, **{name: [*stops, "x"]})
    assert "at most 16" in error["message"]


async def test_completions_have_up_to_twenty_logprobs(start, rack):
    async with start() as gateway:
        await post(gateway, COMPLETIONS, prompt="a", max_tokens=1, logprobs=20)
        assert rack.engines[0].received[-1].sampling.logprobs == 20
        error = await refusal(gateway, COMPLETIONS, prompt="a", max_tokens=1, logprobs=21)
    assert error["param"] == "logprobs"


# Conversations


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"content": None, "reasoning_content": "hm"}])
async def test_assistant_turn_without_content_is_empty(start, rack, turn):
    async with start(template=PLAIN) as gateway:
        await post(gateway, CHAT, messages=[*HI, {"role": "assistant", **turn}, *HI])
        assert prompt(gateway, rack) == "user: hi\nassistant: \nuser: hi\n"
        error = await refusal(gateway, CHAT, messages=[{"role": "user", "content": None}])
    assert error["param"] == "messages[0].content"


async def test_reasoning_item_between_user_items_is_accepted(start, rack):
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}({{ m.reasoning_content }})\n{% endfor %}"
    async with start(template=template) as gateway:
        await post(gateway, RESPONSES, input=[*HI, reasoning, *HI])
        assert prompt(gateway, rack) == "user: hi()\nassistant: (hm)\nuser: hi()\n"


async def test_last_assistant_message_of_anthropic_is_continued(start, rack):
    begun = {"role": "assistant", "content": "The answer is"}
    async with start(" 42") as gateway:
        answer = await post(gateway, MESSAGES, messages=[*HI, begun], max_tokens=8)
        message = rack.engines[0].received[-1]
        await post(gateway, CHAT, messages=[*HI, begun], continue_final_message=True, max_tokens=8)
        chat = rack.engines[0].received[-1]
        counted = await post(gateway, f"{MESSAGES}/count_tokens", messages=[*HI, begun])
    assert answer.json()["content"] == [{"type": "text", "text": " 42", "citations": None}] or (
        answer.json()["content"][0]["text"] == " 42"
    )
    assert message.input_ids == chat.input_ids
    assert counted.json()["input_tokens"] == len(message.input_ids)


@pytest.mark.parametrize(
    "content", ["", "ends with a space ", [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]], ids=str
)
async def test_prefill_without_an_end_is_refused(start, content):
    async with start() as gateway:
        error = await refusal(
            gateway, MESSAGES, messages=[*HI, {"role": "assistant", "content": content}], max_tokens=8
        )
    assert error["message"].startswith("messages")


# Streams


@pytest.mark.parametrize(
    ("options", "final", "continuous"),
    [
        (None, False, False),
        ({}, True, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_options_mean_what_they_mean_in_vllm(start, path, options, final, continuous):
    beside = {"messages": HI} if path == CHAT else {"prompt": "a"}
    async with start() as gateway:
        chunks = events(await post(gateway, path, **beside, stream=True, stream_options=options))
    *others, last = chunks
    assert bool(last.get("usage")) is final
    assert (last["choices"] == []) is final
    assert all(bool(chunk.get("usage")) is continuous for chunk in others)


async def test_stream_options_need_a_stream_unless_empty(start):
    async with start() as gateway:
        await post(gateway, CHAT, messages=HI, stream_options={})
        error = await refusal(gateway, CHAT, messages=HI, stream_options={"include_usage": False})
    assert error["param"] == "stream_options"


# Answers


async def test_null_fields_of_openai_are_present(start):
    async with start() as gateway:
        chat = (await post(gateway, CHAT, messages=HI)).json()
        chunks = events(await post(gateway, CHAT, messages=HI, stream=True))
        completion = (await post(gateway, COMPLETIONS, prompt="a")).json()
        response = (await post(gateway, RESPONSES, input="hi")).json()
    assert {chat[name] for name in ("service_tier", "system_fingerprint")} == {None}
    [choice] = chat["choices"]
    assert choice["logprobs"] is None
    assert {choice["message"][name] for name in ("refusal", "annotations", "audio", "function_call")} == {None}
    assert {chunk["system_fingerprint"] for chunk in chunks} == {None}
    assert {choice["logprobs"] for chunk in chunks for choice in chunk["choices"]} == {None}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert completion["system_fingerprint"] is None
    assert completion["choices"][0]["logprobs"] is None
    absent = ("error", "incomplete_details", "instructions", "max_tool_calls", "previous_response_id", "prompt", "user")
    assert {response[name] for name in absent} == {None}


async def test_models_have_anthropics_shape_for_its_clients(start):
    headers = {"anthropic-version": "2023-06-01"}
    async with start(names=("mock", "alias")) as gateway:
        listing = (await gateway.http.get("/v1/models", headers=headers)).json()
        one = (await gateway.http.get("/v1/models/alias", headers=headers)).json()
        openai = (await gateway.http.get("/v1/models")).json()
    assert openai["object"] == "list"
    assert [model["id"] for model in listing["data"]] == ["mock", "alias"]
    assert (listing["first_id"], listing["last_id"], listing["has_more"]) == ("mock", "alias", False)
    assert one == listing["data"][1]
    assert (one["type"], one["display_name"]) == ("model", "alias")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one["created_at"])


# Operations


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_answers_like_health(start, method):
    async with start() as gateway:
        assert (await gateway.http.request(method, "/ping")).status_code == 200
        gateway.health.drain()
        assert (await gateway.http.request(method, "/ping")).status_code == 503


async def _is(load, expected: int) -> bool:
    return await load() == expected


async def test_load_counts_requests_being_answered(start, rack):
    async with start() as gateway:

        async def load() -> int:
            answer = (await gateway.http.get("/load")).json()
            assert answer.keys() == {"server_load"}
            return answer["server_load"]

        assert await load() == 0
        [engine] = rack.engines
        engine.behavior.hold_at = 1
        bodies = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": ["a", "b"]}, RESPONSES: {"input": "hi"}}
        asked = []
        for number, (path, body) in enumerate(bodies.items(), 1):
            asked.append(asyncio.create_task(post(gateway, path, **body)))
            await until(lambda number=number: _is(load, number), PATIENCE_S, f"{number} requests count")
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        await until(lambda: _is(load, 2), PATIENCE_S, "a client that left is not counted")
        engine.behavior.hold_at = None
        await asyncio.gather(*asked[1:])
        assert await load() == 0
        assert (await gateway.http.post(CHAT, json={"model": "other", "messages": HI})).status_code == 404
        assert await load() == 0


async def test_tokenizer_info_describes_the_tokenizer(start):
    async with start() as gateway:
        info = (await gateway.http.get("/tokenizer_info")).json()
        other = await gateway.http.get("/tokenizer_info", params={"model": "other"})
    assert info["chat_template"] == THINKING_CHATML
    assert info["vocab_size"] == gateway.tokenizer.vocab_size
    assert info["eos_token_ids"] == [EOS]
    assert info["model_max_length"] == 4096
    assert other.status_code == 404
