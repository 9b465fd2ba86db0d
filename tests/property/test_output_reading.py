"""Whatever a model writes, and however it is cut: the same parts, and no text lost, doubled or out of order."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Reasoning, joined
from tandem_services.gateway.output.reader import OutputReading
from tandem_services.gateway.output.reasoning import STYLES
from tandem_services.gateway.output.tool_parsers.json_calls import CallArray
from tandem_services.gateway.output.tool_parsers.registry import FAMILIES

SCHEMAS = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}}
PARSERS = {**{name: family.parser for name, family in FAMILIES.items()}, "array": lambda _: CallArray()}
FRAGMENTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=f>", "<parameter=s>", "</parameter>", "</function>", "<|python_tag|>", "<|python_start|>"),
    *(
        "<|channel>thought",
        "<channel|>",
        "<|tool_call>",
        "call:f{",
        "s:",
        '<|"|>',
        "<tool_call|>",
        "<|tool_call>call:f{",
    ),
    *('{"name": "f"', '"arguments": ', '"parameters": ', '{"s": "a\\"b"}', "{}", "[", "]", "{", "}", ",", ", ", ";"),
    *(
        "[f(",
        "f(s='x')",
        "g(n=1",
        ")",
        '"',
        "'",
        "\\",
        ":",
        "<",
        "=",
        "\n",
        "  ",
        "12",
        "null",
        "text",
        "\u00e9\U0001f600",
    ),
]
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14).map("".join)
styles = st.sampled_from([None, *STYLES.values()])


def read(reading: OutputReading, pieces: list[str]):
    reader = reading.new_reader()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.finish()])


@st.composite
def cut_outputs(draw) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(output=cut_outputs(), family=st.sampled_from(sorted(PARSERS)), style=styles, opened=st.booleans())
def test_parts_depend_on_the_text_alone(output, family, style, opened):
    text, pieces = output
    reading = OutputReading(reasoning=style, opened=opened, tool_parser=PARSERS[family], schemas=SCHEMAS)
    assert read(reading, pieces) == read(reading, [text])


@given(output=cut_outputs(), family=st.sampled_from(sorted(PARSERS)), style=styles, opened=st.booleans())
def test_calls_are_numbered_begin_once_and_keep_to_their_order(output, family, style, opened):
    reading = OutputReading(reasoning=style, opened=opened, tool_parser=PARSERS[family], schemas=SCHEMAS)
    parts = read(reading, output[1])
    assert [part.index for part in parts if isinstance(part, CallBegin)] == [*range(_calls(parts))]
    current = -1
    for part in parts:
        if isinstance(part, CallBegin):
            current = part.index
        elif isinstance(part, CallArguments):
            assert part.index == current


@given(output=cut_outputs(), style=styles, opened=st.booleans())
def test_text_without_tools_is_shown_except_markers(output, style, opened):
    text, pieces = output
    parts = read(OutputReading(reasoning=style, opened=opened), pieces)
    shown = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
    markers = () if style is None else (style.begin, style.end)
    assert _solid(shown, *markers) == _solid(text, *markers)


@given(output=cut_outputs(), family=st.sampled_from(sorted(PARSERS)))
def test_only_first_call_is_read_if_not_parallel(output, family):
    several = OutputReading(tool_parser=PARSERS[family], schemas=SCHEMAS)
    single = OutputReading(tool_parser=PARSERS[family], schemas=SCHEMAS, parallel=False)
    parts = [part for part in read(several, output[1]) if getattr(part, "index", 0) == 0]
    assert read(single, output[1]) == joined(parts)


def _calls(parts) -> int:
    return sum(isinstance(part, CallBegin) for part in parts)


def _solid(text: str, *markers: str) -> str:
    for marker in markers:
        text = text.replace(marker, "")
    return "".join(text.split())
