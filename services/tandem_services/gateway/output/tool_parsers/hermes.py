"""Hermes, Qwen2.5, Qwen3:  <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other."""

from tandem_services.gateway.output.parts import Part
from tandem_services.gateway.output.tool_parsers.json_calls import JsonCall
from tandem_services.gateway.output.tool_parsers.parser import Schemas, StepParser, find_marker

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(StepParser):
    """What is marked as a call and is none stays content."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._call: JsonCall | None = None
        self._closing = False
        """Between a call and its end marker."""

    def finish(self) -> list[Part]:
        if self._call is not None:
            return []
        rest = [] if self._closing else self._gate.add(self._buffer)
        return rest + self._gate.finish()

    def _step(self, parts: list[Part]) -> bool:
        if self._call is not None:
            return self._read_call(self._call, parts)
        return self._close() if self._closing else self._read_content(parts)

    def _read_content(self, parts: list[Part]) -> bool:
        before, marker, self._buffer = find_marker(self._buffer, (BEGIN,))
        parts += self._gate.add(before)
        if marker is not None:
            self._call = JsonCall(self._calls)
        return marker is not None

    def _read_call(self, call: JsonCall, parts: list[Part]) -> bool:
        text, self._buffer = self._buffer, ""
        begun = call.begun
        new, self._buffer = call.feed(text)
        if call.begun and not begun:
            self._gate.call()
            self._calls += 1
        parts += new
        if call.ended:
            self._call = None
            self._closing = call.begun
            if not call.begun:
                parts += self._gate.add(BEGIN + call.raw)
        return call.ended

    def _close(self) -> bool:
        """The end marker; whatever stands in its place is read as content."""
        self._buffer = self._buffer.lstrip()
        if END.startswith(self._buffer):
            # A marker of which no more than this has come, or all of it.
            whole = self._buffer == END
            self._buffer = "" if whole else self._buffer
            self._closing = not whole
            return False
        self._buffer = self._buffer.removeprefix(END)
        self._closing = False
        return True
