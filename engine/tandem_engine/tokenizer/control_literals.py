"""The texts of one tokenizer's special tokens, and whether a rendering has to follow where its text comes from.

A control token in a prompt must come from the chat template, never from what a client sent. Following the origin of
every character (`TracedText`) costs more than rendering, so it is done only where text of a client could be part of a
control literal:

    contents    a string of the client's has the first or last character of a literal, such as "<" or ">"
    template    the template writes literals in pieces (`"<|" + message.role + "|>"`), translates characters, or changes
                the case of text where a literal begins or ends with a letter

Without either, a literal in the rendered text begins and ends in the template's own text, in one piece.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ControlLiterals:
    """Immutable."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals = tuple(literals)
        edges = {edge for text in literals for edge in (text[0], text[-1])}
        self.begin_with_letters = any(edge.lower() != edge.upper() for edge in edges)
        """Or end with one."""
        self._edge = re.compile(f"[{re.escape(''.join(sorted(edges)))}]" if edges else r"(?!)")

    def may_begin_in(self, value: Any) -> bool:
        """Whether any string in a JSON-like value, keys included, has the first or last character of a literal."""
        if isinstance(value, str):
            return self._edge.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.may_begin_in(key) or self.may_begin_in(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return any(map(self.may_begin_in, value))
        return False

    def pieced_together(self, constants: Iterable[str]) -> bool:
        """Whether one of `constants` ends with the beginning of a literal, and one begins with its end, so that text
        between them completes it."""
        constants = list(constants)
        return any(_is_completed(literal, constants) for literal in self._literals)


def _is_completed(literal: str, constants: Sequence[str]) -> bool:
    lengths = range(1, len(literal))
    head = next((n for n in lengths if any(text.endswith(literal[:n]) for text in constants)), None)
    tail = next((n for n in lengths if any(text.startswith(literal[-n:]) for text in constants)), None)
    return head is not None and tail is not None and head + tail < len(literal)
