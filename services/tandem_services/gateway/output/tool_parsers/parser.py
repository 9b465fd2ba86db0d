"""The base of all tool-call parsers, and the helpers that they share.

A parser is a state machine over the text of one output. Its parts depend on the text alone, never on how the text was
split, so an output that resumes on another worker reads the same. Text that may be the beginning of a call is buffered.
"""

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tandem_services.gateway.output.parts import Content, Part

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, by the name of the tool."""


class ToolParser(Protocol):
    """Reads one output. A new instance for each."""

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def finish(self) -> list[Part]:
        """The rest, when the output has ended. A call that has a name keeps the arguments it has; one without a name
        is left out."""
        ...


class Found(NamedTuple):
    """The first marker in a text, and what is around it."""

    before: str
    marker: str | None
    after: str


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Split at the marker that begins first. Without one, `after` is the end that may be half of a marker."""
    starts = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    if starts:
        start, marker = min(starts)
        return Found(text[:start], marker, text[start + len(marker) :])
    held = half_marker(text, markers)
    return Found(text[: len(text) - held], None, text[len(text) - held :])


def half_marker(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in markers)), 0)


class ContentGate:
    """Content around calls, without the blanks that only separate it from them."""

    __slots__ = ("_blank", "_called")

    def __init__(self) -> None:
        self._blank = ""
        self._called = False

    def add(self, text: str) -> list[Part]:
        """Blanks at the end wait for what follows them."""
        text = self._blank + text
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        return [Content(solid)] if solid else []

    def call(self) -> None:
        """A call begins here."""
        self._blank = ""
        self._called = True

    def finish(self) -> list[Part]:
        blank, self._blank = self._blank, ""
        return [Content(blank)] if blank and not self._called else []


class StepParser(ABC):
    """What families share: text that is not decided yet, and steps that decide some of it. Implements `ToolParser`."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._gate = ContentGate()
        self._buffer = ""
        self._calls = 0
        """Calls that have begun."""

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]: ...

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Decide the beginning of the buffer, adding to `parts`. False when that takes more text."""


MAX_LITERAL_CHARACTERS = 64 << 10
"""Longer text is not parsed as Python: what is that long is a text."""


def json_or_literal(text: str) -> str:
    """JSON as it is, a Python literal as JSON, anything else as a JSON string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return python_literal(text)
    return text


def python_literal(text: str) -> str:
    """A Python literal as JSON; anything else as a JSON string."""
    try:
        if len(text) > MAX_LITERAL_CHARACTERS:
            raise ValueError("too long to be looked into")
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_string(text)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
