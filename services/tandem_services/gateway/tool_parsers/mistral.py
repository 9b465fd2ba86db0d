"""Mistral: [TOOL_CALLS] and then an array of calls, or, in newer models, name[ARGS]{…} for each."""

import re

from tandem_services.gateway.output_parts import CallArguments, CallBegin, Part
from tandem_services.gateway.tool_parsers.call_array import CallArray
from tandem_services.gateway.tool_parsers.json_span import JsonSpan
from tandem_services.gateway.tool_parsers.parser import Schemas, StepParser, find_marker

BEGIN = "[TOOL_CALLS]"
_HEAD = re.compile(r"([\w.-]{1,64})\s{0,8}(?:\[CALL_ID\]\w{0,64}\s{0,8})?(?:\[ARGS\]\s{0,8})?(?=\{)")
_LONGEST_HEAD = 192
"""Characters that `_HEAD` looks at: what does not match by then never will."""
_ENDS_OF_HEADS = [end[cut:] for end in ("[CALL_ID]{", "[ARGS]{") for cut in range(len(end))]
"""One of these is what the beginning of a head lacks."""


class MistralParser(StepParser):
    """Reads one output."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at = "content"
        self._array = CallArray()
        self._span = JsonSpan()

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
        solid = self._buffer.lstrip()
        if not solid:
            return False
        if solid[0] == "[":
            self._array = CallArray(first=self._calls)
            self._at = "array"
            return True
        head = _HEAD.match(solid)
        if head is not None:
            self._gate.call()
            parts.append(CallBegin(self._calls, head[1]))
            self._calls += 1
            self._buffer, self._at, self._span = solid[head.end() :], "arguments", JsonSpan()
            return True
        hopeless = not _may_become_head(solid)
        if hopeless:
            parts += self._gate.add(BEGIN)
            self._at = "content"
        return hopeless

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
    return len(text) <= _LONGEST_HEAD and any(_HEAD.match(text + end) for end in _ENDS_OF_HEADS)
