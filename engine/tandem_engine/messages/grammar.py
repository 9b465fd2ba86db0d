"""What the text of an output must look like. Compiled by the engine, checked here for its bounds.

The bounds are for readers of a source that do not compile it: the gateway, and an engine's scheduler.
What a grammar costs to compile is another matter; see `sampling.grammar`.
"""

from enum import StrEnum
from typing import Any

import msgspec

from tandem_engine.base.errors import InvalidRequestError

MAX_GRAMMAR_DEPTH = 32
"""Nested objects and arrays in a JSON source: sixteen levels of properties."""

MAX_CHOICES = 256
MAX_CHOICE_BYTES = 1024
MAX_WHITESPACE_PATTERN_BYTES = 256


class GrammarKind(StrEnum):
    """How `GrammarSpec.source` is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, an object."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    """The whole output matches, as if anchored at both ends."""
    EBNF = "ebnf"
    """GBNF as llama.cpp and xgrammar write it."""
    LARK = "lark"
    """Lark as llguidance reads it."""
    CHOICE = "choice"
    """A JSON array of strings, one of which is the output."""
    STRUCTURAL_TAG = "structural_tag"
    """A JSON object {"structures": [{"begin", "schema", "end"}], "triggers": […]}: free text until it contains a
    trigger, then one of the structures that begin with it, then free text again. With "answer", a JSON schema, the
    output is JSON of that schema, or structures with "separator" between them, "most" at most. With "thoughts", two
    texts, it is one of the structures, and free text between these texts may come before. With "reasoning", two control
    tokens, free text between them may come before free text and structures."""


MAX_GRAMMAR_BYTES = {
    GrammarKind.JSON_SCHEMA: 64 << 10,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: 4 << 10,
    GrammarKind.EBNF: 8 << 10,
    GrammarKind.LARK: 8 << 10,
    GrammarKind.CHOICE: MAX_CHOICES * (MAX_CHOICE_BYTES + 4),
    GrammarKind.STRUCTURAL_TAG: 64 << 10,
}


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One grammar. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str = ""
    whitespace_pattern: str | None = None
    """Regex of what may stand between the tokens of JSON: None for a space or a new line with indentation, "" for
    nothing."""
    lenient: bool = False
    """Ignore keywords of a JSON schema that cannot be enforced, instead of refusing the schema."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a source that is absent or too long to be looked at."""
        limit = MAX_GRAMMAR_BYTES[self.kind]
        size = _size(self.source)
        if size > limit:
            raise InvalidRequestError(
                f"a {self.kind} grammar may have at most {limit} bytes, this one has {size}", param="grammar"
            )
        if not self.source and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequestError(f"a {self.kind} grammar needs a source, this one is empty", param="grammar")
        if self.whitespace_pattern is not None and _size(self.whitespace_pattern) > MAX_WHITESPACE_PATTERN_BYTES:
            raise InvalidRequestError(
                f"whitespace_pattern may have at most {MAX_WHITESPACE_PATTERN_BYTES} bytes, it has "
                f"{_size(self.whitespace_pattern)}",
                param="whitespace_pattern",
            )


def check_depth(document: Any) -> None:
    """Raise `InvalidRequestError` for decoded JSON that is nested too deeply. Recurses nowhere."""
    level, depth = [document], 0
    while level:
        containers = [value for value in level if isinstance(value, dict | list)]
        depth += bool(containers)
        if depth > MAX_GRAMMAR_DEPTH:
            raise InvalidRequestError(f"a grammar may be nested {MAX_GRAMMAR_DEPTH} levels deep", param="grammar")
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]


def check_choices(choices: Any) -> None:
    """Raise `InvalidRequestError` unless this is a list of 1 to `MAX_CHOICES` strings that are neither empty nor
    too long."""
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequestError("choice must be a list of strings that are not empty", param="grammar")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"choice takes 1 to {MAX_CHOICES} strings, this list has {len(choices)}", param="grammar"
        )
    longest = max(map(_size, choices))
    if longest > MAX_CHOICE_BYTES:
        raise InvalidRequestError(
            f"each choice may have at most {MAX_CHOICE_BYTES} bytes, one has {longest}", param="grammar"
        )


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
