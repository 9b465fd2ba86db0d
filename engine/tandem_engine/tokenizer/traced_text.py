"""TracedText: a string that records where each of its characters comes from.

Chat templates split, strip, replace and join what clients send with what they write themselves. `TracedText` follows
every character through Python's string methods and operators, so that after rendering each character is known to be

    TEMPLATE   written by the template, or a special token that the checkpoint names
    CONTENT    sent by the client: messages, tools, documents, template variables
    UNKNOWN    made by an operation that is not followed here

An operation that is not followed returns a plain `str`, which counts as UNKNOWN. So a character never becomes TEMPLATE
by mistake: the tokenizer may only turn TEMPLATE text into control tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, SupportsIndex

TEMPLATE: Final = b"t"
CONTENT: Final = b"c"
UNKNOWN: Final = b"?"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}
_CONVERSION = re.compile(r"%(?:\(([^)]*)\))?([#0\- +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?)[hlL]?(.)", re.DOTALL)


class TracedText(str):
    """A string with one origin byte per character. Equal to, and hashed as, the plain string."""

    __slots__ = ("_origin",)
    _origin: bytes

    def __new__(cls, text: str = "", origin: bytes | None = None) -> "TracedText":
        """`origin`: one byte per character; None: UNKNOWN, or what `text` records itself."""
        made = super().__new__(cls, text)
        made._origin = origin_of(text) if origin is None else origin
        return made

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedText":
        text = super().__getitem__(key)
        origin = self._origin[key]
        return TracedText(text, origin if isinstance(origin, bytes) else bytes((origin,)))

    def __add__(self, other: str) -> "TracedText":
        return TracedText(super().__add__(other), self._origin + origin_of(other))

    def __radd__(self, other: str) -> "TracedText":
        return TracedText(str.__add__(other, self), origin_of(other) + self._origin)

    def __mul__(self, count: SupportsIndex) -> "TracedText":
        return TracedText(super().__mul__(count), self._origin * count)

    def __rmul__(self, count: SupportsIndex) -> "TracedText":
        return self * count

    def __mod__(self, values: Any) -> "TracedText":
        return TracedText(*_formatted(self, values))

    # Cutting

    def strip(self, chars: str | None = None, /) -> "TracedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> "TracedText":
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> "TracedText":
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._parts(super().split(sep, maxsplit), sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._parts(super().rsplit(sep, maxsplit), sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole, position, lines = super().splitlines(True), 0, []
        for line, kept in zip(whole, super().splitlines(keepends), strict=True):
            lines.append(self[position : position + len(kept)])
            position += len(line)
        return list(lines)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*map(len, super().partition(sep)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(*map(len, super().rpartition(sep)))

    # Putting together

    def join(self, parts: Iterable[str], /) -> "TracedText":
        pieces = list(parts)
        return TracedText(super().join(pieces), self._origin.join(map(origin_of, pieces)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "TracedText":
        text = super().replace(old, new, count)
        if not old:
            return _changed(text, self, new)
        kept = (origin_of(part) for part in self._parts(super().split(old, count), old))
        return TracedText(text, origin_of(new).join(kept))

    # Changing characters

    def lower(self) -> "TracedText":
        return _changed(super().lower(), self)

    def upper(self) -> "TracedText":
        return _changed(super().upper(), self)

    def casefold(self) -> "TracedText":
        return _changed(super().casefold(), self)

    def capitalize(self) -> "TracedText":
        return _changed(super().capitalize(), self)

    def title(self) -> "TracedText":
        return _changed(super().title(), self)

    def swapcase(self) -> "TracedText":
        return _changed(super().swapcase(), self)

    # Padding

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> "TracedText":
        return self._padded(super().center(width, fillchar), self if fillchar == " " else fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> "TracedText":
        return self._padded(super().ljust(width, fillchar), self if fillchar == " " else fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> "TracedText":
        return self._padded(super().rjust(width, fillchar), self if fillchar == " " else fillchar)

    def zfill(self, width: SupportsIndex, /) -> "TracedText":
        return self._padded(super().zfill(width), self)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> "TracedText":
        return self._padded(super().expandtabs(tabsize), self)

    def _padded(self, text: str, filler: str) -> "TracedText":
        return self if text == self else TracedText(text, only_origin(self, filler) * len(text))

    def _parts(self, parts: list[str], sep: str | None) -> Iterator["TracedText"]:
        """The slices that `parts` are; they stand in this order, with `sep` or white space between them."""
        position = 0
        for part in parts:
            start = position if sep is not None else self.find(part, position)
            yield self[start : start + len(part)]
            position = start + len(part) + len(sep or "")

    def _three(self, before: int, between: int, after: int) -> tuple[str, str, str]:
        return self[:before], self[before : before + between], self[len(self) - after :]


class TracedMarkup(TracedText):
    """What the filters `e` and `safe` make: text that is added to it is escaped, as with markupsafe's `Markup`.

    Its other methods are those of text that is not escaped. Where `Markup` escapes in them, the rendered text differs
    from that of the plain environment, and the messages are refused.
    """

    __slots__ = ()

    def __add__(self, other: str) -> "TracedMarkup":
        whole = TracedText(self, self._origin) + escaped(other)
        return TracedMarkup(whole, origin_of(whole))

    def __radd__(self, other: str) -> "TracedMarkup":
        whole = escaped(other) + TracedText(self, self._origin)
        return TracedMarkup(whole, origin_of(whole))


def escaped(text: str) -> TracedText:
    """As `markupsafe.escape`: what a character becomes has its origin. `TracedMarkup` is escaped already."""
    if isinstance(text, TracedMarkup):
        return TracedText(text, origin_of(text))
    pieces = [_ESCAPES.get(char, char) for char in str.__iter__(text)]
    origin = (bytes((one,)) * len(piece) for one, piece in zip(origin_of(text), pieces, strict=True))
    return TracedText("".join(pieces), b"".join(origin))


def origin_of(text: str) -> bytes:
    """One byte per character; UNKNOWN for a plain string."""
    return text._origin if isinstance(text, TracedText) else UNKNOWN * len(text)


def traced(value: Any, origin: bytes) -> Any:
    """A copy of a JSON-like value in which every plain string, keys included, is `TracedText` of one origin."""
    if isinstance(value, TracedText):
        return value
    if isinstance(value, str):
        return TracedText(value, origin * len(value))
    if isinstance(value, Mapping):
        return {traced(key, origin): traced(item, origin) for key, item in value.items()}
    if isinstance(value, list):
        return [traced(item, origin) for item in value]
    if isinstance(value, tuple):
        return tuple(traced(item, origin) for item in value)
    return value


def concatenated(pieces: Iterable[str]) -> TracedText:
    """`"".join` that keeps origins."""
    return TracedText().join(pieces)


def _changed(text: str, *sources: str) -> TracedText:
    """Case mappings never shorten a string, so one of equal length has replaced characters one by one."""
    if len(sources) == 1 and len(text) == len(sources[0]):
        return TracedText(text, origin_of(sources[0]))
    return TracedText(text, only_origin(*sources) * len(text))


def only_origin(*sources: str) -> bytes:
    """The origin that all characters of `sources` share, else UNKNOWN."""
    origins = set().union(*map(origin_of, sources))
    return bytes(origins) if len(origins) == 1 else UNKNOWN


def _formatted(pattern: TracedText, values: Any) -> tuple[str, bytes]:
    """`pattern % values`. Bare `%s` is followed; other conversions make UNKNOWN text."""
    text = str.__mod__(pattern, values)
    positional = list(values) if isinstance(values, tuple) else [values]
    pieces: list[str] = []
    end = 0
    for match in _CONVERSION.finditer(pattern):
        key, flags, kind = match.groups()
        pieces.append(pattern[end : match.start()])
        end = match.end()
        if kind == "%":
            pieces.append(pattern[end - 1 : end])
        elif "*" in flags:
            return text, UNKNOWN * len(text)
        else:
            value = values[key] if key is not None else positional.pop(0)
            pieces.append(str(value) if kind == "s" and not flags else f"%{flags}{kind}" % (value,))
    made = concatenated([*pieces, pattern[end:]])
    return (made, made._origin) if made == text else (text, UNKNOWN * len(text))
