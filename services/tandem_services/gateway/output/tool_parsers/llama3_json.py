"""Llama 3.1 to 3.3: {"name": …, "parameters": {…}}, optionally after <|python_tag|>, several separated by "; ".

No marker starts a call, so an object counts as one only if it names a tool of the request.
"""

from tandem_services.gateway.output.parts import Part
from tandem_services.gateway.output.tool_parsers.json_calls import JsonCall
from tandem_services.gateway.output.tool_parsers.parser import Schemas, StepParser, half_marker

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser(StepParser):
    """Reads one output."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._names = frozenset(schemas)
        self._separator = ""
        self._call: JsonCall | None = None
        self._content = False
        """The output is, or has become, ordinary text."""

    def finish(self) -> list[Part]:
        if self._call is not None and self._call.begun:
            return []
        undecided = self._separator + (self._buffer if self._call is None else self._call.raw)
        self._buffer = ""
        return self._gate.add(undecided) + self._gate.finish()

    def _step(self, parts: list[Part]) -> bool:
        if self._content:
            parts += self._gate.add(self._buffer)
            self._buffer = ""
            return False
        return self._decide() if self._call is None else self._read_call(self._call, parts)

    def _decide(self) -> bool:
        """What comes next: a call, its tag, or text."""
        solid = self._buffer.lstrip(_BETWEEN if self._calls else None)
        self._separator += self._buffer[: len(self._buffer) - len(solid)]
        self._buffer = solid
        if solid.startswith(TAG):
            self._buffer = solid.removeprefix(TAG)
            return True
        if half_marker(solid, (TAG,)) == len(solid):
            return False
        if solid[0] == "{":
            self._call = JsonCall(self._calls, self._names)
        else:
            self._become_content()
        return True

    def _read_call(self, call: JsonCall, parts: list[Part]) -> bool:
        begun = call.begun
        new, self._buffer = call.feed(self._buffer)
        parts += new
        if call.begun and not begun:
            self._calls += 1
            self._separator = ""
            self._gate.call()
        if call.ended:
            self._call = None
            if not call.begun:
                self._buffer = call.raw + self._buffer
                self._become_content()
        return call.ended

    def _become_content(self) -> None:
        self._buffer = self._separator + self._buffer
        self._separator = ""
        self._content = True
