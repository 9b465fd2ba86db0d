"""Mistral: [TOOL_CALLS] and then an array of calls, or, in newer models, name[ARGS]{…} for each."""

import re

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Part
from tandem_services.gateway.output.tool_parsers.json_calls import CallArray, JsonSpan
from tandem_services.gateway.output.tool_parsers.parser import Schemas, StepParser, find_marker

BEGIN = "[TOOL_CALLS]"

_HEAD = re.compile(r"([\w.-]{1,64}) ?(?:\[CALL_ID\]\w{0,64} ?)?(?:\[ARGS\] ?)?")
"""What stands between the marker and the arguments, with each run of whitespace as one space."""

_MAX_HEAD_CHARACTERS = 192

_ENDS_OF_HEADS = [end[cut:] for end in ("[CALL_ID]", "[ARGS]") for cut in range(len(end) + 1)]
"""One of these is what the beginning of a head lacks."""


class MistralParser(StepParser):
    """Reads one output."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at = "content"
        self._array = CallArray()
        self._span = JsonSpan()
        self._head: list[str] = []
        """The text since the marker that is, or may become, the head of a call."""
        self._spaced = ""
        """The same with each run of whitespace as one space."""

    def finish(self) -> list[Part]:
        match self._at:
            case "array":
                return self._array.finish()
            case "content":
                return self._gate.add(self._buffer) + self._gate.finish()
            case _:
                return []

    def _step(self, parts: list[Part]) -> bool:
        match self._at:
            case "content":
                return self._read_content(parts)
            case "head":
                return self._read_head(parts)
            case "array":
                return self._read_array(parts)
            case _:
                return self._read_arguments(parts)

    def _read_content(self, parts: list[Part]) -> bool:
        before, marker, self._buffer = find_marker(self._buffer, (BEGIN,))
        parts += self._gate.add(before)
        if marker is not None:
            self._at = "head"
        return marker is not None

    def _read_head(self, parts: list[Part]) -> bool:
        if not self._spaced and self._buffer.lstrip()[:1] == "[":
            self._buffer, self._head = "".join(self._head) + self._buffer, []
            self._array = CallArray(first=self._calls)
            self._at = "array"
            return True
        text, brace, _ = self._buffer.partition("{")
        self._head.append(text)
        self._spaced = re.sub(r"\s+", " ", self._spaced + text).lstrip()
        self._buffer = self._buffer[len(text) :]
        head = _HEAD.fullmatch(self._spaced) if brace else None
        if not brace and (not self._spaced or _may_become_head(self._spaced)):
            return False
        before, self._head, self._spaced = "".join(self._head), [], ""
        if head is None:
            parts += self._gate.add(BEGIN)
            self._buffer, self._at = before + self._buffer, "content"
            return True
        self._gate.call()
        parts.append(CallBegin(self._calls, head[1]))
        self._calls += 1
        self._at, self._span = "arguments", JsonSpan()
        return True

    def _read_array(self, parts: list[Part]) -> bool:
        calls = self._array.feed(self._buffer)
        if calls:
            self._gate.call()
        parts += calls
        self._buffer = self._array.rest() if self._array.ended else ""
        if self._array.ended:
            marker = BEGIN if self._array.calls == self._calls else ""
            parts += self._gate.add(marker + self._array.other)
            self._calls, self._at = self._array.calls, "content"
        return self._array.ended

    def _read_arguments(self, parts: list[Part]) -> bool:
        end = self._span.feed(self._buffer)
        piece, self._buffer = self._buffer[:end], self._buffer[end:]
        if piece:
            parts.append(CallArguments(self._calls - 1, piece))
        if self._span.done:
            self._at = "content"
        return self._span.done


def _may_become_head(text: str) -> bool:
    return len(text) <= _MAX_HEAD_CHARACTERS and any(_HEAD.fullmatch(text + end) for end in _ENDS_OF_HEADS)
