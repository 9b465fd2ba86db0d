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
        self.calls = first
        """Index of the next call."""
        self.ended = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while not self.ended and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        return [] if self._call is None else self._call.close()

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
            # What is no call in such an array is nothing that can be shown.
            self.ended = not self._call.begun
            self.calls += self._call.begun
            self._call = None
            return True
        return False

    def _separate(self) -> bool:
        self._buffer = self._buffer.lstrip(" \t\r\n[,")
        if not self._buffer:
            return False
        if self._buffer[0] == "{":
            self._call = JsonCall(self.calls)
        else:
            self._buffer = self._buffer.removeprefix("]")
            self.ended = True
        return True
