"""llguidance as the backend, with the bundled model's tokenizer: every kind, every bomb, every move of a matcher."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tandem_engine.base.errors import GrammarCompilerError, InvalidRequestError
from tandem_engine.config import GrammarConfig
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.backend import Matcher, masks_for_run
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary
from tandem_engine.scheduler.request import GrammarProgress
from tandem_engine.scheduler.stop import Cut
from tandem_testing.toy_grammar import unpack

TOKENIZER = Path(__file__).resolve().parents[5] / "models" / "tandem-mini" / "tokenizer.json"
VOCAB, EOS, IM_START = 3072, 2, 1


def make_backend(vocab_size: int = VOCAB, file: Path = TOKENIZER, **config: object) -> GuidanceBackend:
    vocabulary = GuidanceVocabulary(tokenizer_file=file, vocab_size=vocab_size, eos_token_ids=(EOS,))
    return GuidanceBackend(vocabulary=vocabulary, config=GrammarConfig(**config))


@pytest.fixture(scope="module")
def backend() -> Iterator[GuidanceBackend]:
    backend = make_backend()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def spec(kind: GrammarKind, source: object = "", **options: object) -> GrammarSpec:
    return GrammarSpec(kind=kind, source=source if isinstance(source, str) else json.dumps(source), **options)


def allowed(matcher: Matcher) -> set[int]:
    bits = np.zeros(VOCAB // 32, dtype=np.int32)
    matcher.fill(bits)
    return unpack(bits)


def matches(backend: GuidanceBackend, tokenizer: Tokenizer, grammar: GrammarSpec, text: str) -> bool:
    """Whether `text` as a whole satisfies the grammar."""
    matcher = backend.compile(grammar).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.accept(ids) == len(ids) and (matcher.ended or EOS in allowed(matcher))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
GBNF = 'root ::= "yes" | "no, " reason\nreason ::= [a-z]+ "."'
LARK = 'start: "yes" | "no, " REASON\nREASON: /[a-z]+\\./'
TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}, "end": "</f>"},
        {"begin": "<f=now>", "schema": {"type": "object", "additionalProperties": False}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}

ANSWER_OR_TAGS = {**TAGS, "answer": PERSON, "separator": "; "}

KINDS = [
    (spec(GrammarKind.JSON_SCHEMA, PERSON), ['{"name": "Ada", "age": 36}'], ['{"name": "Ada"}', '{"age": 3, "x": 1}']),
    (spec(GrammarKind.JSON_SCHEMA, TREE), ["[]", "[[], [[]]]"], ["[", "[1]", "{}"]),
    (spec(GrammarKind.JSON_OBJECT), ["{}", '{"a": [1, null]}', '{\n  "a": 1\n}'], ["[]", "5", '{"a"}']),
    (spec(GrammarKind.JSON_OBJECT, whitespace_pattern=""), ['{"a":[1,2]}'], ['{"a": 1}']),
    (spec(GrammarKind.JSON_SCHEMA, {"type": "integer", "not": {}}, lenient=True), ["5"], ["x"]),
    (spec(GrammarKind.REGEX, r"\d{3}-\d{4}"), ["555-1234"], ["555-123", "x555-1234", "555-12345"]),
    (spec(GrammarKind.REGEX, r"^(cat|dog)s?$"), ["cat", "dogs"], ["a cat", "^cat$"]),
    (spec(GrammarKind.EBNF, GBNF), ["yes", "no, because."], ["no", "no, Because."]),
    (spec(GrammarKind.EBNF, LARK), ["yes", "no, because."], ["no"]),
    (spec(GrammarKind.LARK, LARK), ["yes", "no, because."], ["no"]),
    (spec(GrammarKind.CHOICE, ['say "é😀"\n', "b", "bc"]), ['say "é😀"\n', "b", "bc"], ["say", "c"]),
    (
        spec(GrammarKind.STRUCTURAL_TAG, TAGS),
        ["hello", 'I add <f=add>{"x": 1}</f> and see <f=now>{}</f>', "a < b"],
        ['<f=add>{"x": "1"}</f>', "<f=sub>{}</f>", "<f=add>{}"],
    ),
    (
        spec(GrammarKind.STRUCTURAL_TAG, ANSWER_OR_TAGS),
        ['{"name": "Ada", "age": 36}', '<f=add>{"x": 1}</f>', "<f=now>{}</f>; <f=now>{}</f>; <f=now>{}</f>"],
        ["hello", '{"name": "Ada"}', '{"name": "Ada", "age": 3}<f=now>{}</f>', "<f=now>{}</f><f=now>{}</f>"],
    ),
    (
        spec(GrammarKind.STRUCTURAL_TAG, {**ANSWER_OR_TAGS, "most": 1}),
        ['{"name": "Ada", "age": 36}', "<f=now>{}</f>"],
        ["<f=now>{}</f>; <f=now>{}</f>"],
    ),
]

THOUGHTS = {
    "structures": [
        {
            "begin": "<|im_start|>add <|endoftext|>",
            "schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
        {"begin": "<|im_start|>now <|endoftext|>", "schema": {"type": "object", "additionalProperties": False}},
    ],
    "triggers": ["<|im_start|>"],
    "thoughts": ["<|im_start|>think <|endoftext|>", "<|endoftext|><|im_start|>so"],
}
"""Control tokens within the texts, as models of channels write them."""
KINDS.append(
    (
        spec(GrammarKind.STRUCTURAL_TAG, THOUGHTS),
        [
            '<|im_start|>add <|endoftext|>{"x": 1}',
            "<|im_start|>think <|endoftext|>a {\n<|endoftext|><|im_start|>so<|im_start|>now <|endoftext|>{}",
        ],
        [
            "{}",
            "hello",
            '<|im_start|>add <|endoftext|>{"x": "1"}',
            "<|im_start|>sub <|endoftext|>{}",
            "<|im_start|>think <|endoftext|>a<|endoftext|><|im_start|>so",
            "<|im_start|>now <|endoftext|>{}<|im_start|>now <|endoftext|>{}",
        ],
    )
)
KINDS.append(
    (
        spec(GrammarKind.STRUCTURAL_TAG, {**THOUGHTS, "thoughts": ["", ""]}),
        ["<|im_start|>now <|endoftext|>{}"],
        ["<|im_start|>think <|endoftext|>a<|endoftext|><|im_start|>so<|im_start|>now <|endoftext|>{}"],
    )
)


MARKED_CALLS = {
    "structures": [
        {
            "begin": "<|im_start|>add",
            "schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "end": "<|endoftext|>",
        },
    ],
    "triggers": ["<|im_start|>"],
}
"""Calls between two control tokens, as Gemma 4 writes them."""
MARKED_CALL, MARKED_TEXT = '<|im_start|>add{"x": 1}<|endoftext|>', "<|im_start|>think a {\n<|endoftext|>"
KINDS += [
    (
        spec(GrammarKind.STRUCTURAL_TAG, {**MARKED_CALLS, "reasoning": ["<|im_start|>think", "<|endoftext|>"]}),
        ["hello", "", f"{MARKED_TEXT}so: {MARKED_CALL}{MARKED_CALL} done", f"so {MARKED_CALL}", MARKED_TEXT],
        [f"so {MARKED_TEXT}", '<|im_start|>add{"x": "1"}<|endoftext|>', '<|im_start|>add{"x": 1}', MARKED_TEXT * 2],
    ),
    (
        spec(GrammarKind.STRUCTURAL_TAG, MARKED_CALLS),
        ["hello", MARKED_CALL * 2, f"so {MARKED_CALL} done"],
        [MARKED_TEXT, f"{MARKED_CALL}<|endoftext|>"],
    ),
    (
        spec(GrammarKind.STRUCTURAL_TAG, {**MARKED_CALLS, "answer": PERSON, "most": 2}),
        ['{"name": "Ada", "age": 36}', MARKED_CALL, MARKED_CALL * 2],
        ["hello", MARKED_CALL * 3, '{"name": "Ada"}', f"{MARKED_CALL} done"],
    ),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), KINDS, ids=lambda value: str(value)[:50])
def test_each_grammar_kind_accepts_only_matching_texts(backend, tokenizer, grammar, good, bad):
    assert [text for text in good if not matches(backend, tokenizer, grammar, text)] == []
    assert [text for text in bad if matches(backend, tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("between", "fits"), [("", True), (" ", True), ("\n" + " " * 32, True), ("  ", False), ("\n\n", False)]
)
def test_json_grammar_bounds_whitespace(backend, tokenizer, between, fits):
    text = f'{{{between}"a"{between}:{between}1{between}}}'
    assert matches(backend, tokenizer, spec(GrammarKind.JSON_OBJECT), text) is fits


def test_control_token_trigger_matches_the_token_not_text(backend):
    tags = {"structures": [{"begin": "<|im_start|>", "schema": {"type": "object"}}], "triggers": ["<|im_start|>"]}
    matcher = backend.compile(spec(GrammarKind.STRUCTURAL_TAG, tags)).matcher()
    assert IM_START in allowed(matcher)
    assert matcher.accept((IM_START,)) == 1
    assert EOS not in allowed(matcher)


def test_end_that_is_a_control_token_is_the_token_not_text(backend, tokenizer):
    matcher = backend.compile(spec(GrammarKind.STRUCTURAL_TAG, MARKED_CALLS)).matcher()
    ids = tokenizer.encode('<|im_start|>add{"x": 1}', add_special_tokens=False).ids
    assert matcher.accept(ids) == len(ids)
    assert allowed(matcher) == {tokenizer.token_to_id("<|endoftext|>")}


def test_control_tokens_do_not_pass_for_their_text(backend):
    matcher = backend.compile(spec(GrammarKind.REGEX, r"[\s\S]*")).matcher()
    assert allowed(matcher) & {0, IM_START, EOS} == {EOS}


# What is refused


def bomb(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


INTERSECTION = "start: A\nA: " + " & ".join(f"/.*[a-z]{{{i}}}.{{{i}}}x.*/" for i in range(1, 30))
DOUBLING = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"'

TOO_MUCH = "too big|128 MiB|more than 2 s"
"""Which limit a costly grammar meets first depends on the machine."""

REFUSED = {
    "unclosed regex": (spec(GrammarKind.REGEX, "("), "unclosed group"),
    "look-ahead": (spec(GrammarKind.REGEX, "(?=a)b"), "look-around"),
    "pattern in a schema": (spec(GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "("}), "unclosed group"),
    "unknown keyword": (spec(GrammarKind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}), "uniqueItems"),
    "remote reference": (spec(GrammarKind.JSON_SCHEMA, {"$ref": "http://127.0.0.1/x"}), "cannot be used"),
    "empty enum": (spec(GrammarKind.JSON_SCHEMA, {"enum": []}), "Unsatisfiable"),
    "circular reference": (spec(GrammarKind.JSON_SCHEMA, {"$ref": "#"}), "nothing matches"),
    "no object": (spec(GrammarKind.JSON_SCHEMA, "true"), "must be a JSON object"),
    "no JSON": (spec(GrammarKind.JSON_SCHEMA, "{"), "not valid JSON"),
    "too deep": (spec(GrammarKind.JSON_SCHEMA, bomb(40)), "32 levels"),
    "undefined rule": (spec(GrammarKind.LARK, "start: a"), "unknown name"),
    "undefined GBNF rule": (spec(GrammarKind.EBNF, "root ::= a"), "not found"),
    "no GBNF": (spec(GrammarKind.EBNF, "hello"), "cannot be used"),
    "deep GBNF": (spec(GrammarKind.EBNF, f"root ::= {'(' * 3000}'a'{')' * 3000}"), "cannot be used"),
    "deep Lark": (spec(GrammarKind.LARK, f'start: {"(" * 3000}"a"{")" * 3000}'), "too deeply nested"),
    "deep regex": (spec(GrammarKind.REGEX, f"{'(' * 2000}a{')' * 2000}"), "cannot be used"),
    "large enum": (spec(GrammarKind.JSON_SCHEMA, {"enum": [f"v{i}" for i in range(100_000)]}), TOO_MUCH),
    "doubling rules": (spec(GrammarKind.LARK, DOUBLING), TOO_MUCH),
    "no structures": (spec(GrammarKind.STRUCTURAL_TAG, {"structures": [], "triggers": ["<"]}), "at least one"),
    "no trigger": (
        spec(GrammarKind.STRUCTURAL_TAG, {"structures": [{"begin": "a", "schema": {}}], "triggers": ["b"]}),
        "no trigger",
    ),
    "other tags": (spec(GrammarKind.STRUCTURAL_TAG, {"format": {}}), "not `format`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_grammar_is_refused_with_a_reason_in_one_line(backend, name):  # [structured-output]
    grammar, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        backend.compile(grammar)
    assert refusal.value.param == "grammar"
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


BOMBS = {
    "product of remainders": spec(GrammarKind.JSON_SCHEMA, {"type": "integer", "multipleOf": 100_000_007}),
    "two remainders": spec(
        GrammarKind.JSON_SCHEMA,
        {"allOf": [{"type": "integer", "multipleOf": 10_007}, {"type": "integer", "multipleOf": 10_009}]},
    ),
    "intersection": spec(GrammarKind.LARK, INTERSECTION),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_costs_its_limit_and_the_next_grammar_works(backend, tokenizer, name):  # [grammar-bombs]
    with pytest.raises(InvalidRequestError, match=TOO_MUCH):
        backend.compile(BOMBS[name])
    assert matches(backend, tokenizer, spec(GrammarKind.REGEX, "a+"), "aa")


def test_time_limit_is_named_with_its_flag():
    backend = make_backend(compile_timeout=0.05, compile_memory_bytes=8 << 30)
    with pytest.raises(InvalidRequestError, match=r"more than 0.05 s .*--grammar-compile-timeout"):
        backend.compile(BOMBS["product of remainders"])
    backend.close()


SATISFIABLE = {
    "nested quantifiers": (spec(GrammarKind.REGEX, "(a+)+$"), "aaa"),
    "nested repetition": (spec(GrammarKind.REGEX, "(x{1,1000}){1,1000}"), "xxx"),
    "a billion items": (
        spec(GrammarKind.JSON_SCHEMA, {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
        "[1, 2",
    ),
    "a huge string": (spec(GrammarKind.JSON_SCHEMA, {"type": "string", "minLength": 10**8}), '"abc'),
    "left recursion": (spec(GrammarKind.LARK, 'start: start "a" | "a"'), "aaa"),
}


@pytest.mark.parametrize("name", SATISFIABLE)
def test_satisfiable_grammar_that_resembles_a_bomb_works(backend, tokenizer, name):
    grammar, text = SATISFIABLE[name]
    matcher = backend.compile(grammar).matcher()
    ids = tokenizer.encode(text).ids
    for token in ids:
        assert token in allowed(matcher)
        assert matcher.accept((token,)) == 1
    assert matcher.problem is None


def test_ambiguous_grammar_over_item_limit_reports_problem(backend, tokenizer):
    ambiguous = 'start: a\na: a a a | a a | "x" | "y" | /[a-z]/'
    matcher = backend.compile(spec(GrammarKind.LARK, ambiguous)).matcher()
    (x,) = tokenizer.encode("x").ids
    for _ in range(200):
        allowed(matcher)
        if matcher.problem is not None:
            break
        matcher.accept((x,))
    assert "Too many items" in matcher.problem
    assert not matcher.ended


def test_grammar_over_limit_error_differs_from_mismatch_error(backend, tokenizer):
    """Six hundred optional properties: after the brace any of them may come, more than llguidance follows at once."""
    schema = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(600)}}
    compiled = backend.compile(spec(GrammarKind.JSON_SCHEMA, schema))
    opening = tokenizer.token_to_id('{"')
    assert opening in allowed(compiled.matcher())
    cut = Cut(keep=1, finish=None)
    with pytest.raises(InvalidRequestError, match="cannot be followed after 0 output tokens: .*2000"):
        GrammarProgress.start(compiled).cut((opening,), cut)
    with pytest.raises(InvalidRequestError, match="no token satisfies both"):
        GrammarProgress.start(compiled).cut((EOS,), cut)


# How a matcher moves


@pytest.fixture
def choice(backend, tokenizer) -> tuple[Matcher, int, int]:
    """A matcher of "a" or "ab", and the ids of a and b."""
    a, b = (tokenizer.token_to_id(text) for text in "ab")
    return backend.compile(spec(GrammarKind.CHOICE, ["a", "ab"])).matcher(), a, b


def test_matcher_ends_at_sole_completion_and_otherwise_by_eos(choice):
    matcher, a, b = choice
    assert matcher.accept((a,)) == 1
    assert not matcher.ended
    assert allowed(matcher) == {b, EOS}
    assert matcher.accept((b, b)) == 1
    assert matcher.ended
    matcher.rollback(1)
    assert not matcher.ended
    assert matcher.accept((EOS,)) == 1
    assert matcher.ended
    matcher.rollback(2)
    assert a in allowed(matcher)


def test_token_that_does_not_fit_is_not_taken_and_spoils_nothing(choice):
    matcher, a, b = choice
    assert matcher.accept((b,)) == 0
    assert (matcher.ended, matcher.problem) == (False, None)
    assert matcher.accept((a, a)) == 1
    assert allowed(matcher) == {b, EOS}


def test_matchers_of_one_grammar_are_independent(backend, tokenizer):
    compiled = backend.compile(spec(GrammarKind.REGEX, "[ab][cd]"))
    first, second = compiled.matcher(), compiled.matcher()
    first.accept((tokenizer.token_to_id("a"),))
    assert tokenizer.token_to_id("a") in allowed(second)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_masks_of_a_run_equal_those_of_stepwise_matcher(backend, data):
    """Drafts that fit, drafts that do not, and the end of the grammar in the middle of a run."""
    compiled = backend.compile(spec(GrammarKind.JSON_SCHEMA, PERSON, whitespace_pattern=""))
    matcher = compiled.matcher()
    before: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        before.append(data.draw(st.sampled_from(sorted(allowed(matcher) - {EOS}))))
        matcher.accept(before[-1:])
    drafts: list[int] = []
    draft_matcher = compiled.matcher()
    draft_matcher.accept(before)
    for _ in range(data.draw(st.integers(0, 6))):
        fits = sorted(allowed(draft_matcher))
        drafts.append(data.draw(st.sampled_from(fits) | st.integers(0, VOCAB - 1)))
        draft_matcher.accept(drafts[-1:])
    bits = np.full((len(drafts) + 1, compiled.words), -1, dtype=np.int32)
    written = masks_for_run(matcher, drafts, bits)
    assert 1 <= written <= len(drafts) + 1
    for position in range(written):
        fresh = compiled.matcher()
        assert fresh.accept([*before, *drafts[:position]]) == len(before) + position
        expected = np.zeros(compiled.words, dtype=np.int32)
        fresh.fill(expected)
        assert np.array_equal(bits[position], expected)
    assert (bits[written:] == -1).all()
    if written <= len(drafts):
        reached = compiled.matcher()
        reached.accept([*before, *drafts[: written - 1]])
        assert reached.accept(drafts[written - 1 : written]) == 0 or reached.ended
    assert allowed(matcher) == allowed_after(compiled.matcher(), before)


def allowed_after(matcher: Matcher, tokens: list[int]) -> set[int]:
    matcher.accept(tokens)
    return allowed(matcher)


# Vocabularies


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 100, VOCAB - 100])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size):
    backend = make_backend(vocab_size)
    compiled = backend.compile(spec(GrammarKind.REGEX, "a+"))
    bits = np.zeros(compiled.words, dtype=np.int32)
    compiled.matcher().fill(bits)
    assert compiled.words * 32 >= vocab_size
    assert not np.unpackbits(bits.view(np.uint8), bitorder="little")[VOCAB:].any()
    backend.close()


def test_tokenizer_unsupported_by_llguidance_is_named_in_error(tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).save(str(file))
    backend = make_backend(3, file)
    with pytest.raises(InvalidRequestError, match="do not work with this model's tokenizer"):
        backend.compile(spec(GrammarKind.REGEX, "a+"))
    backend.close()


# The process


def test_compiler_without_room_for_a_process_is_no_fault(tmp_path, monkeypatch, caplog):
    def refuse(*_args, **_options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    backend = make_backend(file=tmp_path / "absent.json")
    with monkeypatch.context() as limited:
        limited.setattr(subprocess, "Popen", refuse)
        with pytest.raises(GrammarCompilerError, match="cannot start the process that compiles grammars: .*limit"):
            backend.compile(spec(GrammarKind.REGEX, "a+"))
    assert "Traceback" not in caplog.text
    backend.close()


def test_process_that_does_not_start_is_no_fault_of_the_request(tmp_path, caplog):
    backend = make_backend(file=tmp_path / "absent.json")
    with pytest.raises(GrammarCompilerError, match="did not start"):
        backend.compile(spec(GrammarKind.REGEX, "a+"))
    assert "exit status" in caplog.text
    backend.close()


def test_one_process_compiles_one_grammar_after_the_other(backend):
    for number in range(5):
        backend.compile(spec(GrammarKind.REGEX, f"a{{{number + 1}}}"))
    assert len(backend._all) == 1


def test_process_that_was_killed_while_it_waited_is_replaced():
    backend = make_backend()
    backend.compile(spec(GrammarKind.REGEX, "a"))
    (prober,) = backend._all
    prober._process.kill()
    prober._process.wait()
    backend.compile(spec(GrammarKind.REGEX, "b"))
    backend.close()


def test_closing_ends_process_and_later_calls_fail():
    backend = make_backend()
    backend.compile(spec(GrammarKind.REGEX, "a"))
    (prober,) = backend._all
    process = prober._process
    backend.close()
    backend.close()
    assert process.returncode is not None
    with pytest.raises(GrammarCompilerError, match="shut down"):
        backend.compile(spec(GrammarKind.REGEX, "b"))


def test_process_is_small_and_free_of_torch():
    check = "import tandem_engine.sampling.grammar.guidance.probe, sys; assert not {'torch', 'numpy'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
