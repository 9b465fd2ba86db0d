"""A tool call written as one JSON object: {"name": …, "arguments": {…}}.

The name is reported as soon as it is complete and arguments as they come. Arguments in front of the name wait for
it. Until there is a name the text may turn out to be something else; `raw` then gives it back unchanged.
"""

import re
from collections.abc import Collection

import msgspec

from tandem_services.gateway.output_parts import CallArguments, CallBegin, Part
from tandem_services.gateway.tool_parsers.json_span import JsonSpan

ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENT_KEYS})
_KEY = re.compile(r'"((?:[^"\\]|\\.){0,128})"\s{0,32}:\s{0,32}(?=\S)', re.DOTALL)
_LONGEST_KEY = 2 * 128 + 2 * 32 + 4
"""Characters that `_KEY` looks at: what does not match by then never will."""


class JsonCall:
    """Reads from the opening brace on. `names`: only these are tools; None takes any."""

    __slots__ = ("_at", "_buffer", "_given", "_index", "_key", "_names", "_span", "_value", "_waiting", "begun", "raw")

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._buffer = ""
        self._at = "open"
        self._key = ""
        self._span = JsonSpan()
        self._value: list[str] = []
        self._waiting: list[str] = []
        self._given = False
        self.raw = ""
        """All text since the opening brace, until there is a name."""
        self.begun = False

    @property
    def ended(self) -> bool:
        """Nothing more is taken; `begun` tells whether it was a call."""
        return self._at == "end"

    def feed(self, text: str) -> tuple[list[Part], str]:
        """The parts that `text` decides, and what comes behind the object."""
        if not self.begun:
            self.raw += text
        self._buffer += text
        parts: list[Part] = []
        while not self.ended and self._step(parts):
            pass
        if not self.ended:
            return parts, ""
        rest, self._buffer = self._buffer, ""
        if not self.begun:
            self.raw = self.raw[: len(self.raw) - len(rest)]
        return parts, rest

    def close(self) -> list[Part]:
        """The end of the output, or of the object: a call without arguments has none."""
        missing = self.begun and not self._given
        self._given = True
        return [CallArguments(self._index, "{}")] if missing else []

    def _step(self, parts: list[Part]) -> bool:
        """One step on; False when it needs more text."""
        match self._at:
            case "open":
                return self._expect({"{": "key"})
            case "key":
                return self._read_key()
            case "value":
                return self._read_value(parts)
            case "next":
                return self._expect({",": "key", "}": "end"}, parts)
            case at:
                raise AssertionError(f"no step from {at}")

    def _expect(self, following: dict[str, str], parts: list[Part] | None = None) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        goal = following.get(self._buffer[0])
        if goal is not None:
            self._buffer = self._buffer[1:]
        self._at = goal or "end"
        if self.ended and parts is not None:
            parts += self.close()
        return True

    def _read_key(self) -> bool:
        self._buffer = self._buffer.lstrip()
        found = _KEY.match(self._buffer)
        if found is None:
            hopeless = self._buffer[:1] not in ('"', "") or len(self._buffer) > _LONGEST_KEY
            self._at = "end" if hopeless else self._at
            return hopeless
        self._key = found[1]
        self._buffer = self._buffer[found.end() :]
        self._span, self._value = JsonSpan(), []
        # Whatever else may be in such an object, one that begins otherwise is not a call.
        self._at = "value" if self.begun or self._key in _KEYS else "end"
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        end = self._span.feed(self._buffer)
        piece, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._key in ARGUMENT_KEYS and self._span.is_nested:
            self._give(piece, parts)
        elif self._key == "name" or self._key in ARGUMENT_KEYS:
            self._value.append(piece)
        if not self._span.done:
            return False
        self._at = "next"
        self._end_value(parts)
        return True

    def _end_value(self, parts: list[Part]) -> None:
        value = "".join(self._value)
        if self._key == "name" and not self.begun:
            self._begin(_text(value), parts)
        elif self._key in ARGUMENT_KEYS and self._span.is_string:
            # Some models write the arguments as a string that holds JSON.
            self._give(_text(value) or "{}", parts)

    def _begin(self, name: str | None, parts: list[Part]) -> None:
        if not name or (self._names is not None and name not in self._names):
            self._at = "end"
            return
        self.begun = True
        self.raw = ""
        parts.append(CallBegin(self._index, name))
        if self._waiting:
            parts.append(CallArguments(self._index, "".join(self._waiting)))
            self._waiting.clear()

    def _give(self, piece: str, parts: list[Part]) -> None:
        if not piece:
            return
        self._given = True
        if self.begun:
            parts.append(CallArguments(self._index, piece))
        else:
            self._waiting.append(piece)


def _text(value: str) -> str | None:
    """The string that a JSON literal stands for; None for anything else."""
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    return decoded if isinstance(decoded, str) else None
