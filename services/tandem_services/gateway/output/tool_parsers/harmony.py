"""gpt-oss: messages on channels, of which a message with a recipient is a tool call (OpenAI's harmony format).

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>JSON<|call|>

    analysis                     reasoning
    commentary, final, others    content
    to=functions.NAME            a call, whatever its channel; the recipient may also stand in the role, before the
                                 channel. Without `functions.` it is one if a tool has that name

An output begins behind `<|start|>assistant`, which the template writes. So all its text belongs to one reader: there is
no reasoning apart from the answer. Text that is no message is content.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part, Reasoning
from tandem_services.gateway.output.tool_parsers.parser import ContentGate, Schemas, find_marker

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

HINT = "<|channel|>analysis"
"""In the chat templates of the family."""

CALL_BEGIN = f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}"
ANSWER_BEGIN = f"{CHANNEL}final{MESSAGE}"
THOUGHTS = (f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant")

MAX_HEADER_CHARACTERS = 512
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_PREFIX = "functions."
_TO = "to="
"""What an output may begin with: the end of the role that the template has begun."""


class _Header(NamedTuple):
    """What stands before `<|message|>`."""

    channel: str
    recipient: str

    @staticmethod
    def of(text: str) -> "_Header":
        """`text` without `<|message|>`: role, channel and content type, each behind its marker."""
        role, _, rest = text.removeprefix(START).partition(CHANNEL)
        channel = rest.partition(CONSTRAIN)[0]
        named = _RECIPIENT.search(channel) or _RECIPIENT.search(role.partition(CONSTRAIN)[0])
        return _Header(next(iter(channel.split()), ""), "" if named is None else named[1])


_NO_HEADER = _Header("", "")


class HarmonyParser:
    """Implements `ToolParser`. Also gives the reasoning."""

    def __init__(self, schemas: Schemas, *, calls: bool = True) -> None:
        """`calls`: messages to functions are tool calls; else they are content."""
        self._schemas = schemas
        self._reads_calls = calls
        self._gate = ContentGate()
        self._buffer = ""
        self._at = "between"
        self._kind = "content"
        """Of the message that is read: reasoning, content or call."""
        self._calls = 0
        self._empty = True
        """Nothing of the message has been read."""
        self._wrote: set[str] = set()
        """Kinds of the messages with text so far."""

    @property
    def reasons(self) -> bool:
        """The newest text belongs to the reasoning."""
        return self._at == "body" and self._kind == "reasoning"

    def feed(self, text: str) -> list[Part]:
        """See `ToolParser`."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """See `ToolParser`. A header that was never completed is left out."""
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        if self._at == "body":
            parts += self._read(rest)
            parts += self._close()
        elif self._at == "between":
            parts += self._gate.add(rest)
        return [*parts, *self._gate.finish()]

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case "between":
                return self._begin(parts)
            case "header":
                return self._read_header(parts)
            case _:
                return self._read_body(parts)

    def _begin(self, parts: list[Part]) -> bool:
        """A header, or text that is none."""
        solid = self._buffer.lstrip()
        if not solid or any(each.startswith(solid) and each != solid for each in (*MARKERS, _TO)):
            return False
        if solid.startswith((START, CHANNEL, _TO)):
            self._at = "header"
            return True
        stray = next((marker for marker in (END, CALL, RETURN, CONSTRAIN) if solid.startswith(marker)), None)
        if stray is not None:
            self._buffer = solid.removeprefix(stray)
            return True
        if solid.startswith(MESSAGE):
            self._buffer = solid.removeprefix(MESSAGE)
        self._open(_NO_HEADER, parts)
        return True

    def _read_header(self, parts: list[Part]) -> bool:
        text, found, rest = self._buffer.lstrip().partition(MESSAGE)
        if len(text) > MAX_HEADER_CHARACTERS:
            self._buffer = self._buffer.lstrip().removeprefix(START).removeprefix(CHANNEL)
            self._open(_NO_HEADER, parts)
            return True
        if found:
            self._buffer = rest
            self._open(_Header.of(text), parts)
        return bool(found)

    def _open(self, header: _Header, parts: list[Part]) -> None:
        self._at, self._empty = "body", True
        name = self._function(header.recipient)
        if name is not None:
            self._kind = "call"
            self._gate.call()
            parts.append(CallBegin(self._calls, name))
            self._calls += 1
        elif header.channel == "analysis":
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _function(self, recipient: str) -> str | None:
        """The tool that a message to `recipient` calls."""
        if not self._reads_calls:
            return None
        name = recipient.removeprefix(_PREFIX)
        return name if name and (name != recipient or name in self._schemas) else None

    def _read_body(self, parts: list[Part]) -> bool:
        before, marker, held = find_marker(self._buffer, _BODY_ENDS)
        parts += self._read(before)
        self._buffer = held
        if marker is None:
            return False
        parts += self._close()
        self._at = "between"
        if marker in (START, CHANNEL):
            self._buffer = marker + held
        return True

    def _read(self, text: str) -> Sequence[Part]:
        if self._kind == "call" and self._empty:
            text = text.lstrip()
        if not text:
            return ()
        # Messages of one kind are one text to the client.
        text = "\n" + text if self._empty and self._kind in self._wrote else text
        self._empty = False
        match self._kind:
            case "call":
                return [CallArguments(self._calls - 1, text)]
            case "reasoning":
                self._wrote.add(self._kind)
                return [Reasoning(text)]
            case _:
                self._wrote.add(self._kind)
                return self._gate.add(text)

    def _close(self) -> Sequence[Part]:
        """The message has ended."""
        return [CallArguments(self._calls - 1, "{}")] if self._kind == "call" and self._empty else ()
