"""Tool calls in every spelling that their grammar accepts: the same calls are read, wherever the text is cut.

Two generators: calls written with random whitespace, escapes and members in random order; and random walks through
the grammars that hold an output to its tools, which produce whatever the grammar allows.
"""

import json
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.guidance.translate import translate
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, joined
from tandem_services.gateway.output.tool_parsers import gemma4
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


MARK = gemma4.QUOTE
half_marks = st.text(alphabet='ab<|">}]:,\\\n', max_size=6).filter(
    lambda text: MARK not in text and not any(text.endswith(MARK[:length]) for length in range(1, len(MARK)))
)
"""Texts with pieces of the mark in them, but not at their end: there, a mark that follows would begin earlier."""
words = st.text(alphabet="ab_-.0", min_size=1, max_size=3)
half_marked = st.recursive(
    st.none() | st.booleans() | st.integers(-500, 500) | st.floats(allow_nan=False, allow_infinity=False) | half_marks,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | half_marks.filter(bool), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def marked(draw, value: object) -> str:
    """`value` as Gemma 4 writes it, with blanks where none matter, and commas behind the last member."""
    match value:
        case dict():
            members = [
                f"{draw(marked_key(key))}{draw(blanks)}:{draw(blanks)}{draw(marked(v))}" for key, v in value.items()
            ]
            return "{" + draw(joined_members(members)) + "}"
        case list():
            return "[" + draw(joined_members([draw(marked(item)) for item in value])) + "]"
        case str():
            return f"{MARK}{value}{MARK}"
        case None:
            return draw(st.sampled_from(["null", "None"]))
        case _:
            return json.dumps(value)


@st.composite
def marked_key(draw, key: str) -> str:
    plain = set(key) <= set("ab_-.0")
    return key if plain and draw(st.booleans()) else f"{MARK}{key}{MARK}"


@st.composite
def joined_members(draw, members: list[str]) -> str:
    text = draw(blanks) + f"{draw(blanks)},{draw(blanks)}".join(members) + draw(blanks)
    return text + draw(st.sampled_from(["", ","])) if members else text


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["f", "g"]), st.dictionaries(words | half_marks.filter(bool), half_marked, max_size=3)
        ),
        min_size=1,
        max_size=2,
    ),
    spelling=st.data(),
)
def test_marked_calls_in_any_spelling_keep_their_arguments(calls, spelling):
    pieces = [
        f"{gemma4.BEGIN}call:{name}{spelling.draw(marked(given_arguments))}{spelling.draw(blanks)}{gemma4.END}"
        for name, given_arguments in calls
    ]
    check_all_cuts("gemma4", "".join(pieces), calls)


VALUES = r"""
start: "<|tool_call>call:f" object "<tool_call|>"
object: "{" (member ("," member){0,2})? "}"
member: KEY ":" value
value: text | NUMBER | "true" | "false" | "null" | list | object
list: "[" (value ("," value){0,2})? "]"
text: "<|\"|>" TEXT "<|\"|>"
KEY: /[a-z_][a-z0-9_]{0,4}/
NUMBER: /-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?/
TEXT: /[^<]{0,6}/
"""
"""What a call of Gemma 4 may be."""


@pytest.mark.parametrize("seed", range(8))
def test_marked_calls_that_its_grammar_accepts_are_read_equally(seed):
    text = walk(LLMatcher.grammar_from_lark(VALUES), b"", random.Random(seed), b"")
    ((name, written),) = calls_of(read(parser_of("gemma4"), [text]))
    check_all_cuts("gemma4", text, [(name, json.loads(written, object_pairs_hook=dict))])
    assert unmarked(text) == unjsoned(written)


def unmarked(text: str) -> str:
    """The characters of a call without those that spell it: blanks, marks, and what stands around keys and texts."""
    body = text.removeprefix(gemma4.BEGIN + "call:f").removesuffix(gemma4.END)
    pieces = body.split(MARK)
    return "".join(json.dumps(piece)[1:-1] if number % 2 else piece for number, piece in enumerate(pieces))


def unjsoned(written: str) -> str:
    """The same of the arguments in JSON, as Python writes JSON."""
    strings = re.findall(r'"(?:[^"\\]|\\.)*"|[^"]+', written)
    return "".join(json.dumps(json.loads(each))[1:-1] if each[0] == '"' else each.replace(" ", "") for each in strings)


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
