"""Every kind of grammar in llguidance's own terms.

Runs in the probe process alone: part of the work is Python, recursive, and holds the interpreter lock.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec, check_choices, check_depth

WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between the tokens of JSON unless a request says otherwise: a space, or a new line and its indentation. Models write
no other, and one that began to would continue with blanks until its output is full."""

EXCERPT = 300

_CONTROL = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])")
"""What may be a control token: `<|channel>` or `[TOOL_CALLS]`."""


def translate(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    """What `LLMatcher` takes. Raises `InvalidRequestError` for a source that is wrong on its face."""
    try:
        return _TRANSLATIONS[spec.kind](spec, tokenizer)
    except RecursionError as error:
        raise refusal(spec.kind, "it is nested too deeply") from error
    except InvalidRequestError:
        raise
    except Exception as error:
        # What converts GBNF raises bare `Exception`s, and all that can go wrong here is the source.
        raise refusal(spec.kind, str(error)) from error


def refusal(kind: GrammarKind, why: str) -> InvalidRequestError:
    """The answer to a wrong grammar, in one line."""
    text = " ".join(why.replace("<non-verbose/>", "").split())
    if len(text) > EXCERPT:
        text = f"{text[:EXCERPT]}…"
    return InvalidRequestError(f"this {kind} grammar cannot be used: {text}", param="grammar")


def _json_schema(spec: GrammarSpec, _: LLTokenizer) -> str:
    schema = _document(spec)
    if not isinstance(schema, dict):
        raise refusal(spec.kind, "a schema must be a JSON object")
    return _schema_grammar(schema, spec)


def _json_object(spec: GrammarSpec, _: LLTokenizer) -> str:
    return _schema_grammar({"type": "object"}, spec)


def _schema_grammar(schema: dict[str, Any], spec: GrammarSpec) -> str:
    pattern = WHITESPACE if spec.whitespace_pattern is None else spec.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": pattern, "lenient": spec.lenient}
    )


def _regex(spec: GrammarSpec, _: LLTokenizer) -> str:
    return LLMatcher.grammar_from_regex(spec.source)


def _ebnf(spec: GrammarSpec, _: LLTokenizer) -> str:
    # vLLM's clients send either syntax in one field, so Lark is recognized and left alone.
    return LLMatcher.grammar_from_lark(any_to_lark(spec.source))


def _lark(spec: GrammarSpec, _: LLTokenizer) -> str:
    return LLMatcher.grammar_from_lark(spec.source)


def _choice(spec: GrammarSpec, _: LLTokenizer) -> str:
    choices = _document(spec)
    check_choices(choices)
    # Lark spells strings as JSON does.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text in a fixed frame."""

    begin: str
    schema: dict[str, Any]
    end: str = ""


class StructuralTags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `structural_tag` response format of vLLM and SGLang."""

    structures: list[Structure]
    triggers: list[str]
    answer: dict[str, Any] | None = None
    """Tandem's: the output is JSON of this schema, or structures one after the other; never free text."""
    separator: str = ""
    """Between structures, with `answer`."""
    most: int | None = None
    """Structures of one output, with `answer`."""
    thoughts: tuple[str, str] | None = None
    """Tandem's: the output is one structure, and free text between these two texts, if there are any, may come before
    it."""
    reasoning: tuple[str, str] | None = None
    """Tandem's: free text between these two texts may come before all else. They are control tokens, which free text
    has not."""


def _structural_tag(spec: GrammarSpec, tokenizer: LLTokenizer) -> str:
    document = _document(spec)
    if isinstance(document, dict) and "format" in document:
        raise refusal(spec.kind, "only the form with `structures` and `triggers` is supported, not `format`")
    try:
        tags = msgspec.convert(document, StructuralTags)
    except msgspec.ValidationError as error:
        raise refusal(spec.kind, str(error)) from error
    if not tags.structures or not all(tags.triggers):
        raise refusal(spec.kind, "it needs at least one structure, and triggers that are not empty")
    control = {_control_id(trigger, tokenizer) is not None for trigger in tags.triggers}
    if len(control) > 1:
        raise refusal(spec.kind, "its triggers must be all control tokens or all plain text")
    if tags.thoughts is not None:
        return LLMatcher.grammar_from_lark(_thoughts_and_tag(spec, tags, tags.thoughts, tokenizer))
    structures = [_tag(tags, structure) for structure in tags.structures]
    if tags.answer is not None:
        return LLMatcher.grammar_from_lark(_answer_or_tags(spec, tags, structures, tokenizer))
    if control == {True}:
        return LLMatcher.grammar_from_lark(_text_and_tags(tags, structures, tokenizer))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(structures, assume_special=False))


def _tag(tags: StructuralTags, structure: Structure) -> StructTag:
    trigger = next((trigger for trigger in tags.triggers if structure.begin.startswith(trigger)), None)
    if trigger is None:
        raise refusal(GrammarKind.STRUCTURAL_TAG, f"no trigger begins the structure {structure.begin!r}")
    return StructTag(trigger=trigger, begin=structure.begin, grammar=structure.schema, end=structure.end)


def _text_and_tags(tags: StructuralTags, structures: list[StructTag], tokenizer: LLTokenizer) -> str:
    """What `StructTag.to_grammar` gives for triggers that are control tokens, where other parts may be some, too."""
    rules = [
        "start: " + ("" if tags.reasoning is None else "reasoning? ") + "tag* TEXT",
        r"TEXT: /(.|\n)*/",
        "tag: " + " | ".join(f"tag_{number}" for number in range(len(structures))),
    ]
    if tags.reasoning is not None:
        before, behind = (_with_controls(text, tokenizer) for text in tags.reasoning)
        rules.append(f"reasoning: {before} TEXT {behind}")
    for number, tag in enumerate(structures):
        begin, end = _around(tag, tokenizer)
        rules.append(f"tag_{number}: TEXT {begin} %json {json.dumps(tag.grammar)} {end}")
    return "\n".join(rules)


def _answer_or_tags(
    spec: GrammarSpec, tags: StructuralTags, structures: list[StructTag], tokenizer: LLTokenizer
) -> str:
    further = f"({json.dumps(tags.separator)} tag)" if tags.separator else "tag"
    if tags.most is None:
        several = f"tag {further}*"
    else:
        several = f"tag {further}{{0,{tags.most - 1}}}" if tags.most > 1 else "tag"
    rules = [
        "start: answer | tags",
        f"answer: %json {_with_options(tags.answer or {}, spec)}",
        f"tags: {several}",
        "tag: " + " | ".join(f"tag_{number}" for number in range(len(structures))),
    ]
    for number, tag in enumerate(structures):
        begin, end = _around(tag, tokenizer)
        rules.append(f"tag_{number}: {begin} %json {json.dumps(tag.grammar)} {end}")
    return "\n".join(rules)


def _thoughts_and_tag(
    spec: GrammarSpec, tags: StructuralTags, thoughts: tuple[str, str], tokenizer: LLTokenizer
) -> str:
    """Control tokens within these texts are only ever the tokens."""
    before, behind = (_with_controls(text, tokenizer) for text in thoughts)
    rules = [
        *(
            ["start: thoughts? tag", f"thoughts: {before} TEXT {behind}", r"TEXT: /(.|\n)*/"]
            if any(thoughts)
            else ["start: tag"]
        ),
        "tag: " + " | ".join(f"tag_{number}" for number in range(len(tags.structures))),
    ]
    for number, structure in enumerate(tags.structures):
        begin, end = (_with_controls(text, tokenizer) for text in (structure.begin, structure.end))
        rules.append(f"tag_{number}: {begin} %json {_with_options(structure.schema, spec)} {end}")
    return "\n".join(rules)


def _around(tag: StructTag, tokenizer: LLTokenizer) -> tuple[str, str]:
    """What is before and behind the JSON of `tag`, in Lark. A trigger may be a control token of any spelling."""
    begin = f"{_piece(tag.trigger, tokenizer)} {_with_controls(tag.begin.removeprefix(tag.trigger), tokenizer)}"
    return begin, _with_controls(tag.end, tokenizer)


def _with_controls(text: str, tokenizer: LLTokenizer) -> str:
    """`text` in Lark: control tokens by their ids, all else as strings."""
    return " ".join(_piece(piece, tokenizer) for piece in _CONTROL.split(text) if piece)


def _piece(piece: str, tokenizer: LLTokenizer) -> str:
    """One control token or one string. Lark has names only for control tokens in angle brackets, ids for all."""
    token = _control_id(piece, tokenizer)
    return _quoted(piece) if token is None else f"<[{token}]>"


def _with_options(schema: dict[str, Any], spec: GrammarSpec) -> str:
    pattern = WHITESPACE if spec.whitespace_pattern is None else spec.whitespace_pattern
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": pattern, "lenient": spec.lenient}})


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _control_id(text: str, tokenizer: LLTokenizer) -> int | None:
    """The one control token that the model has for it, which its characters do not pass for; None if it has none."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None


def _document(spec: GrammarSpec) -> Any:
    try:
        document = msgspec.json.decode(spec.source)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise refusal(spec.kind, f"its source is not valid JSON: {error}") from error
    check_depth(document)
    return document


_TRANSLATIONS: dict[GrammarKind, Callable[[GrammarSpec, LLTokenizer], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.JSON_OBJECT: _json_object,
    GrammarKind.REGEX: _regex,
    GrammarKind.EBNF: _ebnf,
    GrammarKind.LARK: _lark,
    GrammarKind.CHOICE: _choice,
    GrammarKind.STRUCTURAL_TAG: _structural_tag,
}


@dataclass(kw_only=True, slots=True)
class GuidanceVocabulary:
    """Shared by all grammars of a model, whatever thread compiles them.

    Building takes a quarter of a second for 128k tokens, without the interpreter lock.
    """

    tokenizer_file: Path
    """`tokenizer.json`"""
    vocab_size: int
    """Of the model, whose logits may be wider than the tokenizer."""
    eos_token_ids: tuple[int, ...]
    """At least one: how a model ends an output whose grammar would let it continue."""
    _built: LLTokenizer | None = None
    _lock: Lock = field(default_factory=Lock)

    def tokenizer(self) -> LLTokenizer:
        """Raises `InvalidRequestError` when llguidance does not know this kind of tokenizer: no request can help it."""
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> LLTokenizer:
        document = self.tokenizer_file.read_text("utf-8")
        eos = [*self.eos_token_ids]
        try:
            return LLTokenizer(document, n_vocab=self.vocab_size, eos_token=eos)
        except ValueError:
            # Either the tokenizer knows more tokens than the model, or it is of a kind unknown to llguidance.
            return self._build_at_its_own_size(document, eos)

    def _build_at_its_own_size(self, document: str, eos: list[int]) -> LLTokenizer:
        try:
            return LLTokenizer(document, eos_token=eos)
        except ValueError as error:
            raise InvalidRequestError(
                f"grammars do not work with this model's tokenizer: {error}", param="grammar"
            ) from error
