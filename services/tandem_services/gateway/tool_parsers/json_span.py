"""Where one JSON value ends, found while it arrives. Linear; nothing is decoded and nothing is kept.

What is inside the value is not judged: a model that was not held to a grammar may write what is not JSON, and the
client is given what it wrote.
"""

import re

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
            # Not JSON outside a string: the model has gone on to a marker without closing what it had opened.
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
