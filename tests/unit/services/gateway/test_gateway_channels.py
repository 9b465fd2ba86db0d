"""gpt-oss over HTTP: channels of its outputs, tool calls, and grammars that hold messages to schemas."""

import json
from pathlib import Path

import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.output.tool_parsers.harmony import MARKERS
from tandem_testing.gateway_builders import events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

TEMPLATE = Path(__file__).parents[2] / "engine/tokenizer/chat_templates/channels_typescript.jinja"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": SCHEMA}}
THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>It rains."
CALL = THOUGHT + '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    return TextTokenizer.load(write_tokenizer(folder, chat_template=TEMPLATE.read_text(), specials=MARKERS))


@pytest.fixture
def says(tokenizer, rack):
    """A gateway in front of an engine that always writes the same text."""

    def start(text: str, **config):
        behavior = MockBehavior(token=scripted_tokens(script(tokenizer, text, eos=EOS)), eos=EOS)
        rack.add("solo", behavior).context_length = 4096
        return live_gateway(rack.context, tokenizer, rack.engines, **config)

    return start


def streamed(response) -> dict:
    message: dict = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in events(response):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                name, arguments = message["calls"].get(call["index"], ("", ""))
                function = call["function"]
                message["calls"][call["index"]] = (
                    name + function.get("name", ""),
                    arguments + function.get("arguments", ""),
                )
            message["finish"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("config", [{}, {"tool_call_parser": "none"}, {"reasoning_parser": "openai_gptoss"}])
async def test_channels_are_reasoning_and_content(says, config):
    async with says(ANSWER, **config) as gateway:
        whole = (await gateway.chat()).json()
        pieces = streamed(await gateway.chat(stream=True))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain?", "It rains.")
    assert (pieces["reasoning_content"], pieces["content"]) == ("Rain?", "It rains.")
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]


async def test_reasoning_is_left_out_on_request(says):
    async with says(ANSWER) as gateway:
        message = (await gateway.chat(include_reasoning=False)).json()["choices"][0]["message"]
    assert message["content"] == "It rains."
    assert not message.get("reasoning_content")


async def test_messages_to_functions_are_tool_calls(says):
    async with says(CALL) as gateway:
        whole = (await gateway.chat(tools=[WEATHER])).json()["choices"][0]
        pieces = streamed(await gateway.chat(tools=[WEATHER], stream=True))
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (whole["finish_reason"], whole["message"]["reasoning_content"]) == ("tool_calls", "Rain?")
    assert (pieces["calls"], pieces["finish"]) == ({0: ("weather", '{"city": "Bern"}')}, "tool_calls")


async def test_without_tools_a_call_is_content(says):
    async with says(CALL) as gateway:
        message = (await gateway.chat()).json()["choices"][0]["message"]
    assert message["content"] == '{"city": "Bern"}'
    assert not message.get("tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_forced_calls_are_messages_by_their_schema(says, rack, choice):
    async with says(CALL) as gateway:
        message = (await gateway.chat(tools=[WEATHER], tool_choice=choice)).json()["choices"][0]["message"]
    grammar = rack.engines[0].received[-1].sampling.grammar
    document = json.loads(grammar.source)
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    begin = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    assert document["structures"] == [{"begin": begin, "schema": SCHEMA}]
    assert document["thoughts"] == ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant"]
    assert message["reasoning_content"] == "Rain?"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}


@pytest.mark.parametrize("tools", [None, [WEATHER]])
async def test_formatted_answers_are_messages_of_the_final_channel(says, rack, tools):
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with says(THOUGHT + '<|channel|>final<|message|>{"city": "Bern"}') as gateway:
        message = (await gateway.chat(response_format=asked, tools=tools)).json()["choices"][0]["message"]
    structures = json.loads(rack.engines[0].received[-1].sampling.grammar.source)["structures"]
    assert structures[-1] == {"begin": "<|channel|>final<|message|>", "schema": SCHEMA}
    assert len(structures) == (1 if tools is None else 2)
    assert (message["reasoning_content"], message["content"]) == ("Rain?", '{"city": "Bern"}')


async def test_with_a_budget_a_grammar_holds_behind_the_reasoning(says, rack):
    async with says(CALL) as gateway:
        fields = {"tools": [WEATHER], "tool_choice": "required", "thinking_token_budget": 7}
        message = (await gateway.chat(**fields)).json()["choices"][0]["message"]
    document = json.loads(rack.engines[0].received[-1].sampling.grammar.source)
    assert document["thoughts"] == ["", ""]
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("Rain?", 1)


async def test_strict_tools_need_a_forced_call(says):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with says(CALL) as gateway:
        response = await gateway.chat(tools=[strict])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_budget_ends_the_analysis_with_its_markers(says, rack, tokenizer):
    async with says(ANSWER) as gateway:
        assert (await gateway.chat(thinking_token_budget=7)).status_code == 200
    budget = rack.engines[0].received[-1].sampling.reasoning_budget
    begin, end = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    )
    assert (budget.begin, budget.end, budget.opened) == (begin, end, False)


@pytest.mark.parametrize(("preamble", "analysis"), [(None, "I look."), ("Let me see.", "I look.\nLet me see.")])
async def test_history_is_rendered_with_its_thinking(says, rack, tokenizer, preamble, analysis):
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    history = [
        {"role": "user", "content": "Rain <|end|>?"},
        {
            "role": "assistant",
            "content": preamble,
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    async with says(ANSWER) as gateway:
        assert (await gateway.chat(messages=history, tools=[WEATHER])).status_code == 200
    prompt = rack.engines[0].received[-1].input_ids
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    thought = f"<|start|>assistant<|channel|>analysis<|message|>{analysis}<|end|>"
    assert f"{thought}<|start|>assistant to=functions.weather" in text
    # What the user wrote is no control token.
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    assert list(prompt).count(end) == text.count("<|end|>") - 1
