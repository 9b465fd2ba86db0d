"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true,{inner:null}]}<tool_call|>.

Keys are plain words. Texts stand between two equal marks and have no escapes. All other values are as in JSON. Some
checkpoints write a bare `:` in place of `call:`. Arguments in JSON are read, too: the grammar of strict tools enforces
them between the same markers.

The arguments become JSON as they are read: texts in pieces, other values once they are complete.
"""

import re
from collections.abc import Callable, Mapping

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part
from tandem_services.gateway.output.tool_parsers.json_calls import JsonSpan
from tandem_services.gateway.output.tool_parsers.parser import (
    Schemas,
    StepParser,
    find_marker,
    half_marker,
    json_or_literal,
    json_string,
)

BEGIN = "<|tool_call>"
END = "<tool_call|>"
QUOTE = '<|"|>'
MARKERS = (BEGIN, END, QUOTE)

REASONING = ("<|channel>thought", "<channel|>")

TAG = (BEGIN, f"{BEGIN}call:{{name}}", END)
"""A call whose arguments are JSON, see `ToolFamily.tag`."""

_HEAD = re.compile(r"\s{0,8}(?:call)?:\s{0,8}([\w.-]{1,64})\s{0,8}\{")
_HALF_HEAD = re.compile(r"\s{0,8}(?:c|ca|cal|call|(?:call)?:\s{0,8}[\w.-]{0,64}\s{0,8})?")
_BLANKS = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s,]*")
_REST_OF_CALL = re.compile(r"[\s}\])]*")
_KEY = re.compile(r'[^:,{}\[\]<"]*')
_SCALAR = re.compile(r"[^,}\]<]*")

_AT_ONCE = 4096
"""Characters of JSON that are looked at in one go, so that work is linear in the length of a piece."""


class Gemma4Parser(StepParser):
    """Argument pieces always add up to JSON once the call is closed."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at = "content"
        self._name = ""
        self._inside = ""
        """What is being read of the arguments; see `_READERS`."""
        self._closers: list[str] = []
        """Of the objects and lists that are open, the innermost last."""
        self._filled: list[bool] = []
        """Whether each of them has a member."""
        self._word: list[str] = []
        """The key or the value without quotes that is being read."""
        self._key = ""
        """The newest key of the arguments themselves."""
        self._span = JsonSpan()

    def finish(self) -> list[Part]:
        if self._at == "content":
            return self._gate.add(self._buffer) + self._gate.finish()
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case "content":
                return self._read_content(parts)
            case "head":
                return self._read_head(parts)
            case "arguments":
                return self._read_arguments(parts)
            case _:
                return self._close()

    def _read_content(self, parts: list[Part]) -> bool:
        before, marker, self._buffer = find_marker(self._buffer, (BEGIN,))
        parts += self._gate.add(before)
        if marker is not None:
            self._at = "head"
        return marker is not None

    def _read_head(self, parts: list[Part]) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None:
            self._gate.call()
            self._name = head[1]
            parts += [CallBegin(self._calls, self._name), CallArguments(self._calls, "{")]
            self._calls += 1
            self._buffer, self._at, self._inside = self._buffer[head.end() :], "arguments", "member"
            self._closers, self._filled = ["}"], [False]
            return True
        if _HALF_HEAD.fullmatch(self._buffer):
            return False
        parts += self._gate.add(BEGIN)
        self._at = "content"
        return True

    def _close(self) -> bool:
        """What is behind the last brace, up to the end marker."""
        self._buffer = self._buffer[_end(_REST_OF_CALL, self._buffer, 0) :]
        if END.startswith(self._buffer) and self._buffer != END:
            return False
        self._buffer, self._at = self._buffer.removeprefix(END), "content"
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        text, at = self._buffer, 0
        pieces: list[str] = []
        read: tuple[int, str, int] | None = None
        while self._closers and read != (read := (at, self._inside, len(self._closers))):
            at = _READERS[self._inside](self, text, at, pieces)
        self._buffer = text[at:]
        if pieces:
            parts.append(CallArguments(self._calls - 1, "".join(pieces)))
        if not self._closers:
            self._at = "closing"
        return not self._closers

    # Each of the following reads from one position on and returns the next. It changes nothing when it takes more text
    # to decide what stands there.

    def _begin_entry(self, text: str, at: int, pieces: list[str]) -> tuple[int, str | None]:
        """The position and marker of the next member or item; no marker where more text is needed, or none follows."""
        at = _end(_SEPARATORS, text, at)
        marker = _marker(text, at)
        if marker is None:
            return at, None
        if marker in (BEGIN, END):
            return self._leave_all(at, pieces), None
        if text[at] in "}]":
            return self._leave(at + 1, pieces), None
        if self._filled[-1]:
            pieces.append(", ")
        self._filled[-1] = True
        return at, marker

    def _read_member(self, text: str, at: int, pieces: list[str]) -> int:
        """What begins a key, or ends the object."""
        at, marker = self._begin_entry(text, at, pieces)
        if marker is None:
            return at
        if text[at] == '"':
            self._span, self._inside = JsonSpan(), "json key"
            return at
        self._inside = "quoted key" if marker == QUOTE else "key"
        return at + len(marker)

    def _read_key(self, text: str, at: int, pieces: list[str]) -> int:
        at, ended = self._read_word(_KEY, text, at)
        if ended:
            self._end_key("".join(self._word).strip(), pieces)
        return at

    def _read_quoted_key(self, text: str, at: int, pieces: list[str]) -> int:
        end, closed = _quoted(text, at)
        self._word.append(text[at:end])
        if not closed:
            return end
        self._end_key("".join(self._word), pieces)
        return end + len(QUOTE)

    def _read_json_key(self, text: str, at: int, pieces: list[str]) -> int:
        """Its escapes stay as they are."""
        end = at + self._span.feed(text[at : at + _AT_ONCE])
        self._word.append(text[at:end])
        if self._span.done:
            key = "".join(self._word)
            self._end_key(key[1:-1], pieces, written=key)
        return end

    def _end_key(self, key: str, pieces: list[str], *, written: str | None = None) -> None:
        self._word.clear()
        if len(self._closers) == 1:
            self._key = key
        pieces.append(f"{json_string(key) if written is None else written}: ")
        self._inside = "colon"

    def _read_colon(self, text: str, at: int, _: list[str]) -> int:
        at = _end(_BLANKS, text, at)
        if at < len(text):
            self._inside = "value"
            at += text[at] == ":"
        return at

    def _read_value(self, text: str, at: int, pieces: list[str]) -> int:
        """What begins the value of a key."""
        at = _end(_BLANKS, text, at)
        marker = _marker(text, at)
        if marker is None:
            return at
        if marker in (BEGIN, END) or text[at] in ",}]":
            pieces.append("null")
            self._inside = "member"
            return at
        return self._begin_value(marker, text, at, pieces)

    def _read_item(self, text: str, at: int, pieces: list[str]) -> int:
        """What begins an item, or ends the list."""
        at, marker = self._begin_entry(text, at, pieces)
        if marker is None:
            return at
        return self._begin_value(marker, text, at, pieces)

    def _begin_value(self, marker: str, text: str, at: int, pieces: list[str]) -> int:
        if marker == QUOTE:
            pieces.append('"')
            self._inside = "text"
            return at + len(QUOTE)
        character = text[at]
        if character in "{[":
            pieces.append(character)
            self._closers.append("}" if character == "{" else "]")
            self._filled.append(False)
            self._continue()
            return at + 1
        self._span = JsonSpan()
        self._inside = "json text" if character == '"' else "scalar"
        return at

    def _read_text(self, text: str, at: int, pieces: list[str]) -> int:
        end, closed = _quoted(text, at)
        pieces.append(json_string(text[at:end])[1:-1])
        if not closed:
            return end
        pieces.append('"')
        self._continue()
        return end + len(QUOTE)

    def _read_json_text(self, text: str, at: int, pieces: list[str]) -> int:
        end = at + self._span.feed(text[at : at + _AT_ONCE])
        pieces.append(text[at:end])
        if self._span.done:
            self._continue()
        return end

    def _read_scalar(self, text: str, at: int, pieces: list[str]) -> int:
        """A number, true, false or null; anything else is a text without its marks."""
        at, ended = self._read_word(_SCALAR, text, at)
        if ended:
            word = "".join(self._word).strip()
            self._word.clear()
            pieces.append(json_string(word) if self._takes_text() else json_or_literal(word))
            self._continue()
        return at

    def _read_word(self, word: re.Pattern[str], text: str, at: int) -> tuple[int, bool]:
        """Where it ends so far, and whether that is its end. A `<` that begins no marker belongs to it."""
        end = _end(word, text, at)
        self._word.append(text[at:end])
        marker = _marker(text, end)
        if marker is None:
            return end, False
        if marker == "" and text[end] == "<":
            self._word.append("<")
            return end + 1, False
        return end, True

    def _takes_text(self) -> bool:
        """Whether the schema has nothing but a text here."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, dict) and len(self._closers) == 1 else None
        return isinstance(schema, dict) and schema.get("type") == "string"

    def _leave(self, at: int, pieces: list[str]) -> int:
        """The innermost object or list ends, whichever bracket the model has written."""
        pieces.append(self._closers.pop())
        self._filled.pop()
        self._continue()
        return at

    def _leave_all(self, at: int, pieces: list[str]) -> int:
        """The model has ended the call before it has closed what it had opened."""
        pieces += reversed(self._closers)
        self._closers.clear()
        self._filled.clear()
        return at

    def _continue(self) -> None:
        if self._closers:
            self._inside = "member" if self._closers[-1] == "}" else "item"


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where what the pattern takes ends. It takes the empty text, too."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _marker(text: str, at: int) -> str | None:
    """The marker at this position; "" when there is none; None when the text ends before that is decided."""
    for marker in MARKERS:
        if text.startswith(marker, at):
            return marker
    rest = text[at : at + max(map(len, MARKERS))]
    return None if any(marker.startswith(rest) for marker in MARKERS) else ""


def _quoted(text: str, at: int) -> tuple[int, bool]:
    """Where the text between quote marks ends so far, and whether its mark stands there."""
    end = text.find(QUOTE, at)
    if end >= 0:
        return end, True
    return len(text) - half_marker(text[max(at, len(text) - len(QUOTE)) :], (QUOTE,)), False


_READERS: Mapping[str, Callable[[Gemma4Parser, str, int, list[str]], int]] = {
    "member": Gemma4Parser._read_member,
    "key": Gemma4Parser._read_key,
    "quoted key": Gemma4Parser._read_quoted_key,
    "json key": Gemma4Parser._read_json_key,
    "colon": Gemma4Parser._read_colon,
    "value": Gemma4Parser._read_value,
    "item": Gemma4Parser._read_item,
    "text": Gemma4Parser._read_text,
    "json text": Gemma4Parser._read_json_text,
    "scalar": Gemma4Parser._read_scalar,
}
