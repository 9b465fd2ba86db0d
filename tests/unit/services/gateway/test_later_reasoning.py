"""Reasoning after an answer has begun: in streams and whole answers of the chat, of Responses and of Messages."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Reasoning, joined
from tandem_services.gateway.output.reader import OutputReading
from tandem_services.gateway.output.reasoning import STYLES
from tandem_services.gateway.output.tool_parsers import gemma4, harmony
from tandem_testing.gateway_builders import events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

TEMPLATES = Path(__file__).parents[2] / "engine/tokenizer/chat_templates"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "now", "parameters": SCHEMA}


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a family writes a thought, content, another thought, more content, and a call."""

    template: str
    specials: tuple[str, ...]
    text: str
    call: str


FORMATS = {
    "gemma4": Format(
        template="half_bracket_marks_typed_values.jinja",
        specials=(*gemma4.MARKERS, "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
        text="<|channel>thought\nRain?\n<channel|>Wait.<|channel>thought\nNo, sun.\n<channel|>It is sunny.",
        call='<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>',
    ),
    "gpt-oss": Format(
        template="channels_typescript.jinja",
        specials=harmony.MARKERS,
        text=(
            "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>No, sun.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is sunny."
        ),
        call='<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{"city": "Bern"}',
    ),
}


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory) -> tuple[Format, TextTokenizer]:
    each = FORMATS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    template = (TEMPLATES / each.template).read_text()
    return each, TextTokenizer.load(write_tokenizer(folder, chat_template=template, specials=each.specials))


@pytest.fixture
def gateway(written, rack):
    """In front of an engine that always writes the text of the family, then the call."""
    each, tokenizer = written
    behavior = MockBehavior(token=scripted_tokens(script(tokenizer, each.text + each.call, eos=EOS)), eos=EOS)
    rack.add("solo", behavior).context_length = 4096
    return live_gateway(rack.context, tokenizer, rack.engines)


def named_events(response) -> list[dict]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def test_chat_joins_later_reasoning_and_content(gateway):
    fields = {"tools": [{"type": "function", "function": WEATHER}], "max_tokens": 900}
    async with gateway as door:
        whole = (await door.chat(**fields)).json()
        chunks = events(await door.chat(stream=True, **fields))
    message = whole["choices"][0]["message"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for field, text in (("reasoning_content", "Rain?\nNo, sun."), ("content", "Wait.\nIt is sunny.")):
        assert message[field] == text
        assert "".join(delta.get(field) or "" for delta in deltas) == text
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


async def test_reasoning_tokens_leave_out_content_between(written, rack):
    each, tokenizer = written
    text, fields = each.text.replace("Wait.", "Wait. " * 40), {"max_tokens": 2000}
    behavior = MockBehavior(token=scripted_tokens(script(tokenizer, text, eos=EOS)), eos=EOS)
    rack.add("solo", behavior).context_length = 4096
    async with live_gateway(rack.context, tokenizer, rack.engines) as door:
        usage = (await door.chat(**fields)).json()["usage"]
    between = len(tokenizer.encode("Wait. " * 40, add_special_tokens=False))
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < usage["completion_tokens"] - between


RESPONSES = [
    ("reasoning", "Rain?"),
    ("message", "Wait."),
    ("reasoning", "No, sun."),
    ("message", "It is sunny."),
    ("function_call", '{"city": "Bern"}'),
]


def item_text(item: dict) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


async def test_responses_give_later_reasoning_an_item_of_its_own(gateway):
    body = {"model": "mock", "input": "hi", "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 900}
    async with gateway as door:
        whole = (await door.http.post("/v1/responses", json=body)).json()
        found = named_events(await door.http.post("/v1/responses", json={**body, "stream": True}))
    assert [(item["type"], item_text(item)) for item in whole["output"]] == RESPONSES
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [(item["type"], item_text(item)) for item in done] == RESPONSES
    pieces = {event["output_index"]: "" for event in found if "output_index" in event}
    for event in found:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] += event["delta"]
    assert list(pieces.values()) == [text for _, text in RESPONSES]


async def test_messages_give_later_reasoning_a_block_of_its_own(gateway):
    tool = {"name": "weather", "description": "now", "input_schema": SCHEMA}
    body = {
        "model": "mock",
        "max_tokens": 900,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
    }
    async with gateway as door:
        whole = (await door.http.post("/v1/messages", json=body)).json()
        found = named_events(await door.http.post("/v1/messages", json={**body, "stream": True}))
    blocks = [(block["type"], block.get("thinking", block.get("text"))) for block in whole["content"]]
    texts = ["Rain?", "Wait.", "No, sun.", "It is sunny."]
    assert blocks == [
        *zip(["thinking", "text"] * 2, texts, strict=True),
        ("tool_use", None),
    ]
    pieces = {event["index"]: "" for event in found if event["type"] == "content_block_start"}
    for event in found:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            pieces[event["index"]] += delta.get("thinking", delta.get("text", delta.get("partial_json", "")))
    assert list(pieces.values())[:4] == texts


THOUGHT, END = gemma4.REASONING
CALL = '<|tool_call>call:weather{city:<|"|>TEXT<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A {THOUGHT}\nb\n{END}\nc", [Content("A "), Reasoning("b"), Content("c")]),
        (f"A{THOUGHT} b {END}{THOUGHT} c {END} d", [Content("A"), Reasoning("b\nc"), Content("\nd")]),
        (f"A{THOUGHT}\n{END}b", [Content("A"), Content("\nb")]),
        (f"A{THOUGHT}\nnever ends ", [Content("A"), Reasoning("never ends")]),
        ("A<|chan", [Content("A<|chan")]),
        (f"A{END}b", [Content(f"A{END}b")]),
        (
            CALL + f"{THOUGHT}\nb\n{END}c",
            [CallBegin(0, "weather"), CallArguments(0, '{"city": "TEXT"}'), Reasoning("b"), Content("c")],
        ),
        (
            f"A{THOUGHT}\nb\n" + CALL,
            [Content("A"), Reasoning("b"), CallBegin(0, "weather"), CallArguments(0, '{"city": "TEXT"}')],
        ),
        *(
            (
                f"A{THOUGHT}\nb\n{end}{CALL}c",
                [
                    Content("A"),
                    Reasoning("b"),
                    CallBegin(0, "weather"),
                    CallArguments(0, '{"city": "TEXT"}'),
                    Content("\nc"),
                ],
            )
            for end in (END, "")
        ),
        (
            CALL.replace("TEXT", f"{THOUGHT}x{END}"),
            [CallBegin(0, "weather"), CallArguments(0, json.dumps({"city": f"{THOUGHT}x{END}"}))],
        ),
    ],
)
def test_later_reasoning_is_cut_from_content_in_any_pieces(text, expected):
    reading = OutputReading(reasoning=STYLES["gemma4"], tool_parser=gemma4.Gemma4Parser, schemas={"weather": SCHEMA})
    for pieces in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        reader = reading.new_reader()
        parts = [part for piece in pieces for part in reader.feed(piece)]
        assert joined([*parts, *reader.finish()]) == joined(expected)


def test_later_reasoning_is_content_of_families_without_it():
    reader = OutputReading(reasoning=STYLES["qwen3"]).new_reader()
    assert joined([*reader.feed("Yes <think>no</think>"), *reader.finish()]) == [Content("Yes <think>no</think>")]
