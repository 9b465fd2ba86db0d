"""Gemma 4 over HTTP: its thoughts, tool calls between control tokens, and what holds them to schemas."""

import json
from pathlib import Path

import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.output.tool_parsers.gemma4 import MARKERS
from tandem_testing.gateway_builders import events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

TEMPLATE = Path(__file__).parents[2] / "engine/tokenizer/chat_templates/half_bracket_marks_typed_values.jinja"
SPECIALS = (*MARKERS, "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
THOUGHT = "<|channel>thought\nRain?\n<channel|>"
CALL = '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
ARGUMENTS = '{"city": "Bern", "days": 2}'
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("marked")
    return TextTokenizer.load(write_tokenizer(folder, chat_template=TEMPLATE.read_text(), specials=SPECIALS))


@pytest.fixture
def says(tokenizer, rack):
    """A gateway in front of an engine that always writes the same text."""

    def start(text: str, **config):
        behavior = MockBehavior(token=scripted_tokens(script(tokenizer, text, eos=EOS)), eos=EOS)
        rack.add("solo", behavior).context_length = 4096
        return live_gateway(rack.context, tokenizer, rack.engines, **config)

    return start


def grammar_of(rack):
    grammar = rack.engines[0].received[-1].sampling.grammar
    return grammar.kind, json.loads(grammar.source)


@pytest.mark.parametrize("fields", [{}, THINKING], ids=["thoughts-closed", "thoughts-wanted"])
async def test_reasoning_and_content_are_separate_fields_of_a_message(says, fields):
    async with says(THOUGHT + "It rains.") as gateway:
        message = (await gateway.chat(**fields)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain?", "It rains.")


async def test_output_without_thoughts_is_content(says):
    async with says("It rains.") as gateway:
        message = (await gateway.chat(**THINKING)).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, "It rains.")


@pytest.mark.parametrize("thought", [THOUGHT, THOUGHT.removesuffix("<channel|>")], ids=["closed", "open"])
async def test_call_behind_thoughts_is_a_call(says, thought):
    """Some outputs go from thoughts to a call without an end of the thoughts."""
    async with says(thought + CALL) as gateway:
        whole = (await gateway.chat(tools=[WEATHER], **THINKING)).json()["choices"][0]
        deltas = [
            choice["delta"]
            for chunk in events(await gateway.chat(tools=[WEATHER], stream=True, **THINKING))
            for choice in chunk["choices"]
        ]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert (whole["finish_reason"], whole["message"]["reasoning_content"]) == ("tool_calls", "Rain?")
    assert whole["message"]["content"] is None
    pieces = [call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(pieces) == ARGUMENTS
    assert "".join(delta.get("content") or "" for delta in deltas) == ""


async def test_strict_tools_are_held_to_their_schema(says, rack):
    async with says(THOUGHT + CALL) as gateway:
        message = (await gateway.chat(tools=[STRICT], **THINKING)).json()["choices"][0]["message"]
    kind, document = grammar_of(rack)
    assert kind is GrammarKind.STRUCTURAL_TAG
    assert document["structures"] == [{"begin": "<|tool_call>call:weather", "schema": SCHEMA, "end": "<tool_call|>"}]
    assert document["reasoning"] == ["<|channel>thought", "<channel|>"]
    assert (message["reasoning_content"], message["tool_calls"][0]["function"]["arguments"]) == ("Rain?", ARGUMENTS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_forced_calls_are_an_array_by_their_schema(says, rack, choice):
    async with says(f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]') as gateway:
        message = (await gateway.chat(tools=[WEATHER], tool_choice=choice)).json()["choices"][0]["message"]
    assert grammar_of(rack)[0] is GrammarKind.JSON_SCHEMA
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern", "days": 2}


async def test_formatted_answer_may_be_a_call_instead(says, rack):
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    call = f"<|tool_call>call:weather{ARGUMENTS}<tool_call|>"
    async with says(call) as gateway:
        message = (await gateway.chat(tools=[WEATHER], response_format=asked)).json()["choices"][0]["message"]
    assert grammar_of(rack)[1]["answer"] == SCHEMA
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_budget_ends_thoughts_with_their_markers(says, rack, tokenizer):
    async with says(THOUGHT + "It rains.") as gateway:
        assert (await gateway.chat(thinking_token_budget=7, **THINKING)).status_code == 200
    budget = rack.engines[0].received[-1].sampling.reasoning_budget
    begin, end = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("<|channel>thought", "<channel|>")
    )
    assert (budget.begin, budget.end) == (begin, end)
    assert budget.ended_by == tuple(tokenizer.encode("<|tool_call>", add_special_tokens=False))


async def test_grammar_behind_a_budget_allows_no_second_thought(says, rack):
    async with says(THOUGHT + CALL) as gateway:
        assert (await gateway.chat(tools=[STRICT], thinking_token_budget=7, **THINKING)).status_code == 200
    assert "reasoning" not in grammar_of(rack)[1]


async def test_history_is_rendered_in_its_marks(says, rack, tokenizer):
    function = {"name": "weather", "arguments": ARGUMENTS}
    history = [
        {"role": "user", "content": "Rain <|tool_call>?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "no"},
    ]
    async with says("No.") as gateway:
        assert (await gateway.chat(messages=history, tools=[WEATHER])).status_code == 200
    prompt = tokenizer.decode(list(rack.engines[0].received[-1].input_ids), skip_special_tokens=False)
    assert prompt.endswith(
        f'thought\nI look.\n<channel|>{CALL}<|tool_response>response:weather{{value:<|"|>no<|"|>}}<tool_response|>'
    )
    (mark,) = tokenizer.encode("<|tool_call>", add_special_tokens=False)
    assert list(rack.engines[0].received[-1].input_ids).count(mark) == 1
