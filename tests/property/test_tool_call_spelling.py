"""Tool calls in every spelling that their grammar accepts: the same calls are read, wherever the text is cut.

Two generators: calls written with random whitespace, escapes and members in random order; and random walks through
the grammars that hold an output to its tools, which produce whatever the grammar allows.
"""

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.guidance.translate import translate
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, joined
from tandem_services.gateway.output.tool_parsers.json_calls import CallArray
from tandem_services.gateway.output.tool_parsers.registry import FAMILIES
from tandem_services.gateway.output.tools import call_array_schema, tag_document

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "minimum": -99, "maximum": 99},
            "deep": {"type": "array", "items": {"enum": [True, None, "]", "}", "<", 1.5]}, "maxItems": 3},
        },
        "required": ["s"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
BLANKS = r"[ \t\r\n]{0,50}"


def read(new_parser: Callable, pieces: Sequence[str]):
    parser = new_parser()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish()])


def calls_of(parts) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    texts = [[part.name, ""] for part in parts if isinstance(part, CallBegin)]
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index][1] += part.text
    return [(name, arguments) for name, arguments in texts]


def parser_of(family: str) -> Callable:
    return CallArray if family == "array" else lambda: FAMILIES[family].parser(SCHEMAS)


def check_all_cuts(family: str, text: str, expected: list[tuple[str, object]]) -> None:
    """Reads `text` whole, one character at a time and in two pieces for each cut; and every beginning of it.

    A beginning may hold fewer calls and less of the last call's arguments, but never arguments that the whole does
    not begin with: `{}` in place of arguments that were not read is one such.
    """
    new_parser = parser_of(family)
    whole = read(new_parser, [text])
    calls = calls_of(whole)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert not [part for part in whole if isinstance(part, Content)]
    assert read(new_parser, list(text)) == whole
    for cut in range(len(text)):
        assert read(new_parser, [text[:cut], text[cut:]]) == whole
        part = calls_of(read(new_parser, [text[:cut]]))
        assert len(part) <= len(calls)
        for (name, arguments), (begun, so_far) in zip(calls, part, strict=False):
            assert begun == name
            assert arguments.startswith(so_far)


# Written by a generator.

blanks = st.text(alphabet=" \t\r\n", max_size=3) | st.sampled_from(["", " " * 33, "\n" * 40, "\r\n\t " * 30])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(alphabet='ab"\\{}[]<>:,é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab{", max_size=2), inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(st.text(alphabet='ab}"', min_size=1, max_size=3), values, max_size=3)


@st.composite
def spelled(draw, value: object) -> str:
    """`value` as JSON, with blanks wherever JSON allows them and some characters of strings as escapes."""

    def space() -> str:
        return draw(blanks)

    match value:
        case dict():
            members = [f"{draw(spelled(k))}{space()}:{space()}{draw(spelled(v))}" for k, v in value.items()]
            return "{" + space() + f"{space()},{space()}".join(members) + space() + "}"
        case list():
            return "[" + space() + f"{space()},{space()}".join([draw(spelled(v)) for v in value]) + space() + "]"
        case str() if draw(st.booleans()):
            return '"' + "".join(f"\\u{ord(character):04x}" for character in value) + '"'
        case _:
            return json.dumps(value, ensure_ascii=False)


@st.composite
def call_objects(draw, key: str) -> tuple[str, tuple[str, dict]]:
    name, given_arguments = draw(st.sampled_from(["f", "g"])), draw(arguments)
    extra = draw(st.sampled_from([{}, {"type": "function"}, {"id": "x" * 200}]))
    members = draw(st.permutations([*{"name": name, key: given_arguments, **extra}.items()]))
    return draw(spelled(dict(members))), (name, given_arguments)


@st.composite
def outputs(draw) -> tuple[str, str, list]:
    family = draw(st.sampled_from(["array", "hermes", "llama3_json", "mistral", "mistral-args"]))
    key = "parameters" if family == "llama3_json" else "arguments"
    found = draw(st.lists(call_objects(key), min_size=1, max_size=2))
    objects = [text for text, _ in found]
    match family:
        case "array":
            text = "[" + draw(blanks) + f"{draw(blanks)},{draw(blanks)}".join(objects) + draw(blanks) + "]"
        case "mistral":
            text = "[TOOL_CALLS]" + draw(blanks) + "[" + ",".join(objects) + "]"
        case "hermes":
            text = "".join(f"<tool_call>{draw(blanks)}{item}{draw(blanks)}</tool_call>" for item in objects)
        case "llama3_json":
            text = draw(blanks) + f"{draw(blanks)};{draw(blanks)}".join(objects)
        case _:
            text = "".join(
                f"[TOOL_CALLS]{draw(blanks)}{name}{draw(blanks)}[ARGS]{draw(blanks)}{draw(spelled(value))}"
                for _, (name, value) in found
            )
    return family.partition("-")[0], text, [call for _, call in found]


@settings(max_examples=40)
@given(output=outputs())
def test_json_calls_in_any_spelling_keep_their_arguments(output):
    check_all_cuts(*output)


@pytest.mark.parametrize("blank", [" " * 33, "\n" * 500, "\r\n\t" * 100], ids=["33-spaces", "500-lines", "mixed"])
@pytest.mark.parametrize("family", ["array", "hermes", "llama3_json", "mistral"])
def test_long_whitespace_around_colon_keeps_arguments(family, blank):
    call = f'{{"name"{blank}:{blank}"f"{blank},{blank}"arguments"{blank}:{blank}{{"s": "x"}}{blank}}}'
    text = {"array": f"[{call}]", "hermes": f"<tool_call>{call}</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}
    check_all_cuts(family, text.get(family, call), [("f", {"s": "x"})])


def test_pythonic_call_with_long_key_and_blanks_keeps_arguments():
    key, blank = "k" * 200, " " * 40
    text = f"[{blank}f({blank}{key}{blank}={blank}'x'{blank}),{blank}g(),]"
    check_all_cuts("pythonic", text, [("f", {key: "x"}), ("g", {})])


# Written by the grammars themselves.


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def walk(grammar: str, begin: bytes, choose: random.Random, end: bytes) -> str:
    """Bytes that the grammar accepts, after `begin`, until it accepts no more or there is JSON in front of `end`."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    assert matcher.consume_tokens([*begin]), matcher.get_error()
    output = bytearray(begin)
    while not matcher.is_stopped() and not (end and output.endswith(end) and is_json(output[len(begin) : -len(end)])):
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [int(token) for token in np.flatnonzero(np.unpackbits(packed, bitorder="little")) if token < 256]
        if not allowed:
            break
        favored = [token for token in allowed if token in b" \t\r\n"] if choose.random() < 0.4 else []
        token = choose.choice(favored or [token for token in allowed if token < 128] or allowed)
        assert matcher.consume_tokens([token]), matcher.get_error()
        output.append(token)
        assert len(output) < 5000
    assert not matcher.is_error(), matcher.get_error()
    return output.decode()


@pytest.mark.parametrize("seed", range(12))
def test_forced_calls_accepted_by_grammar_are_read_equally(seed):
    source = json.dumps(call_array_schema(SCHEMAS, most=2))
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source, whitespace_pattern=BLANKS if seed % 2 else None)
    text = walk(translate(spec, LLTokenizer("byte")), b"", random.Random(seed), b"")
    check_all_cuts("array", text, [(call["name"], call["arguments"]) for call in json.loads(text)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.tag is not None])
def test_strict_calls_accepted_by_grammar_are_read_equally(family, seed):
    tag = FAMILIES[family].tag
    assert tag is not None
    source = json.dumps(tag_document(SCHEMAS, tag, strict={"f", "g"}))
    grammar = translate(GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=source), LLTokenizer("byte"))
    begin, end = tag[1].format(name="f"), tag[2]
    text = walk(grammar, begin.encode(), random.Random(seed), end.encode())
    given_arguments = json.loads(text[len(begin) : -len(end)])
    check_all_cuts(family, text, [("f", given_arguments)])
