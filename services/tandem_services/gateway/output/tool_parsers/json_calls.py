"""Incremental readers of tool calls in JSON, shared by the parsers of several model families.

    JsonSpan    finds the end of one JSON value as it arrives, in linear time, without decoding or copying it
    JsonCall    one call as an object: {"name": …, "arguments": {…}}
    CallArray   calls as an array of such objects: the form that a grammar enforces when a client requires a call, for
                every family; also Mistral's own form

`JsonCall` reports the name as soon as it is complete and arguments as they arrive; arguments before the name wait for
it. Until there is a name the text may still be something else, and `raw` returns it unchanged. It accepts every
spelling that JSON allows: whitespace between tokens, escapes in keys, members in any order. The first of two equal keys
counts. Arguments are `{}` only for a complete object without arguments, or with null or an empty string.

Values are not validated: a model without a grammar may write invalid JSON, and the client gets what it wrote.
"""

import re
from collections.abc import Collection

import msgspec

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part

_PLAIN = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[-+.\w]+")


class JsonSpan:
    """One value. `done` once it has ended; `is_string` and `is_nested` once it has begun."""

    __slots__ = ("_depth", "_escaped", "_in_scalar", "_in_string", "done", "is_nested", "is_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._in_scalar = False
        self._escaped = False
        self.done = False
        self.is_string = False
        self.is_nested = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value. The first of all must not be a blank."""
        at = 0
        while at < len(text) and not self.done:
            at = self._string(text, at) if self._in_string else self._outside(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain.end()
        self._escaped = text[at] == "\\"
        if text[at] == '"':
            self._in_string = False
            self.done = self._depth == 0
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        character = text[at]
        if self._in_scalar:
            return self._scalar(text, at)
        if character == '"':
            self.is_string |= self._depth == 0
            self._in_string = True
        elif character in "{[":
            self.is_nested = True
            self._depth += 1
        elif self._depth == 0:
            return self._scalar(text, at)
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        elif character == "<":
            # Not JSON outside a string: the model has continued to a marker without closing what it had opened.
            self.done = True
            return at
        else:
            between = _BETWEEN.match(text, at)
            assert between is not None, f"{character!r} is none of the characters above"
            return between.end()
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        self._in_scalar = True
        scalar = _SCALAR.match(text, at)
        self.done = scalar is None or scalar.end() < len(text)
        return at if scalar is None else scalar.end()


ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENT_KEYS})
_ANY = ""

_FOLLOWING: dict[str, dict[str, str]] = {
    "open": {"{": "first"},
    "first": {'"': "key", "}": "end"},
    "member": {'"': "key"},
    "colon": {":": "blank"},
    "blank": {_ANY: "value"},
    "next": {",": "member", "}": "end"},
}
"""State → next state by the next character that is not whitespace."""

_MAX_KEY_CHARACTERS = 6 * max(map(len, _KEYS)) + 2
"""Of a key above in quotes, each character written as an escape."""

_EMPTY_ARGUMENTS = frozenset({"null", '""'})


class JsonCall:
    """Reads from the opening brace on. `names`: only these are tools; None takes any."""

    __slots__ = ("_at", "_buffer", "_given", "_index", "_key", "_names", "_raw", "_span", "_value", "_waiting", "begun")

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
        """The member with the arguments has been read or is being read."""
        self._raw: list[str] = []
        self.begun = False

    @property
    def ended(self) -> bool:
        """Nothing more is taken; `begun` states whether it was a call."""
        return self._at == "end"

    @property
    def raw(self) -> str:
        """All text since the opening brace, until there is a name."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[list[Part], str]:
        """The parts that `text` completes, and the text after the object."""
        if not self.begun:
            self._raw.append(text)
        self._buffer += text
        parts: list[Part] = []
        while not self.ended and self._step(parts):
            pass
        if not self.ended:
            return parts, ""
        rest, self._buffer = self._buffer, ""
        if not self.begun:
            self._raw = [self.raw.removesuffix(rest)]
        return parts, rest

    def _step(self, parts: list[Part]) -> bool:
        """One step forward; False when it needs more text."""
        match self._at:
            case "key":
                return self._read_key()
            case "value":
                return self._read_value(parts)
            case _:
                return self._expect(parts)

    def _expect(self, parts: list[Part]) -> bool:
        """Whitespace and one character; a character that JSON does not allow here ends the reading."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        following, character = _FOLLOWING[self._at], self._buffer[0]
        self._at = following.get(character, following.get(_ANY, "end"))
        if self._at in ("key", "value"):
            # The character is the first of the JSON value that comes next.
            self._span, self._value = JsonSpan(), []
        elif character in following:
            self._buffer = self._buffer[1:]
            if self.ended and self.begun and not self._given:
                # The object is complete: a call without a member for arguments has none.
                self._give("{}", parts)
        return True

    def _read_key(self) -> bool:
        if not self._read_span():
            if not self.begun and sum(map(len, self._value)) > _MAX_KEY_CHARACTERS:
                self._at = "end"
                return True
            return False
        self._key = _text("".join(self._value)) or ""
        # An object whose first key is any other is not a call, whatever else it contains.
        self._at = "colon" if self.begun or self._key in _KEYS else "end"
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        if self._key in ARGUMENT_KEYS and not self._given:
            return self._read_arguments(parts)
        if not self._read_span():
            return False
        self._at = "next"
        if self._key == "name" and not self.begun:
            self._begin(_text("".join(self._value)), parts)
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        before = len(self._value)
        done = self._read_span()
        if self._span.is_nested:
            self._give("".join(self._value[before:]), parts)
        if not done:
            return False
        self._at, self._given = "next", True
        value = "".join(self._value)
        if value in _EMPTY_ARGUMENTS:
            self._give("{}", parts)
        elif self._span.is_string:
            # Some models write the arguments as a string that holds JSON.
            decoded = _text(value)
            self._give(value if decoded is None else decoded, parts)
        elif not self._span.is_nested:
            self._give(value, parts)
        return True

    def _read_span(self) -> bool:
        """Whether the JSON value at the beginning of the buffer is complete; `_value` has what there is of it."""
        end = self._span.feed(self._buffer)
        self._value.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return self._span.done

    def _begin(self, name: str | None, parts: list[Part]) -> None:
        if not name or (self._names is not None and name not in self._names):
            self._at = "end"
            return
        self.begun = True
        self._raw.clear()
        parts.append(CallBegin(self._index, name))
        if self._waiting:
            parts.append(CallArguments(self._index, "".join(self._waiting)))
            self._waiting.clear()

    def _give(self, piece: str, parts: list[Part]) -> None:
        if not piece:
            return
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


class CallArray:
    """Reads from the opening bracket on. Implements `ToolParser` for an output that is nothing else."""

    def __init__(self, *, first: int = 0) -> None:
        self._buffer = ""
        self._call: JsonCall | None = None
        self._first = first
        self._before = ""
        """What stands before the first call."""
        self.calls = first
        """Index of the next call."""
        self.ended = False
        self.other = ""
        """What the array has in place of a call, which ends it; without any call, all that was read."""

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while not self.ended and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        return []

    def rest(self) -> str:
        """The text after the array, once it has `ended`. Called once."""
        rest, self._buffer = self._buffer, ""
        return rest

    def _step(self, parts: list[Part]) -> bool:
        if self._call is None:
            return self._separate()
        new, self._buffer = self._call.feed(self._buffer)
        parts += new
        if self._call.ended:
            if self._call.begun:
                self.calls += 1
            else:
                self._end(self._call.raw)
            self._call = None
            return True
        return False

    def _separate(self) -> bool:
        solid = self._buffer.lstrip(" \t\r\n[,")
        if not self._called:
            self._before += self._buffer[: len(self._buffer) - len(solid)]
        self._buffer = solid
        if not solid:
            return False
        if solid[0] == "{":
            self._call = JsonCall(self.calls)
        else:
            self._buffer = solid.removeprefix("]") if self._called else solid
            self._end("")
        return True

    @property
    def _called(self) -> bool:
        return self.calls > self._first

    def _end(self, other: str) -> None:
        self.other = other if self._called else self._before + other
        self.ended = True
