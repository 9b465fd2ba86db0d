"""What the text of an output must look like. Compiled by the engine, checked here for its bounds."""

from enum import StrEnum

import msgspec

from tandem_engine.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 64 * 1024


class GrammarKind(StrEnum):
    """How `GrammarSpec.source` is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    """GBNF as llama.cpp and xgrammar write it."""
    LARK = "lark"
    """Lark as llguidance reads it."""
    CHOICE = "choice"
    """A JSON array of strings, one of which is the output."""
    STRUCTURAL_TAG = "structural_tag"
    """A JSON object in the form of OpenAI-compatible servers' `structural_tag` response format."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One grammar. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str = ""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a source that is absent or too long to be looked at."""
        size = len(self.source.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes, this {self.kind} has {size}", param="grammar"
            )
        if not self.source and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequestError(f"a grammar of kind {self.kind} needs a source", param="grammar")
