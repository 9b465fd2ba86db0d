"""Calls as a JSON array of objects: [{"name": …, "arguments": {…}}, …].

The form that a grammar enforces when the client requires a call, whatever the model's own form is; and Mistral's.
"""

from tandem_services.gateway.output_parts import Part
from tandem_services.gateway.tool_parsers.json_call import JsonCall


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
        """What stands behind the array, once it has `ended`. Asked once."""
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
