"""Reasoning that begins again after content or a tool call.

It reads the parts of an output, not its text: a marker inside the arguments of a call is an argument.
"""

from collections.abc import Sequence

from tandem_services.gateway.output.parts import Content, Part, Reasoning
from tandem_services.gateway.output.tool_parsers.parser import find_marker

SEPARATOR = "\n"
"""Between two texts of one kind that another kind stood between, where an answer has one text of each kind."""


class LaterReasoning:
    """Reads the parts of one output. Blanks around the reasoning belong to its markers."""

    __slots__ = ("_at", "_begin", "_blank", "_buffer", "_end", "_fresh", "_wrote")

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._buffer = ""
        self._at = "outside"
        self._fresh = False
        """The next text is the first of its kind since the kind has changed."""
        self._wrote = {Content: False, Reasoning: False}
        self._blank = True
        """The content so far ends with a blank, or there is none."""

    @property
    def reasons(self) -> bool:
        """The newest text belongs to the reasoning."""
        return self._at in ("before", "inside")

    def feed(self, parts: Sequence[Part]) -> list[Part]:
        """`parts`, of which content between markers has become reasoning."""
        read: list[Part] = []
        for part in parts:
            match part:
                case Content(text):
                    self._buffer += text
                    while self._step(read):
                        pass
                case Reasoning():
                    self._wrote[Reasoning] = True
                    read.append(part)
                case _:
                    # A call ends the reasoning, also without its marker.
                    read += [*self.finish(), part]
        return read

    def finish(self) -> list[Part]:
        """The rest, when the output has ended or a call begins."""
        read: list[Part] = []
        reasoned = self.reasons
        self._write(self._buffer.rstrip() if reasoned else self._buffer, read)
        self._buffer, self._at, self._fresh = "", "outside", self._fresh or reasoned
        return read

    def _step(self, read: list[Part]) -> bool:
        match self._at:
            case "before" | "behind":
                self._buffer = self._buffer.lstrip()
                if not self._buffer:
                    return False
                self._at = "inside" if self._at == "before" else "outside"
                return True
            case "inside":
                before, marker, held = find_marker(self._buffer, (self._end,))
                solid = before.rstrip()
                self._write(solid, read)
                self._buffer = held if marker is not None else before[len(solid) :] + held
                following = "behind"
            case _:
                before, marker, self._buffer = find_marker(self._buffer, (self._begin,))
                self._write(before, read)
                following = "before"
        if marker is not None:
            self._at, self._fresh = following, True
        return marker is not None

    def _write(self, text: str, read: list[Part]) -> None:
        if not text:
            return
        kind = Reasoning if self.reasons else Content
        if self._fresh and self._wrote[kind] and not (kind is Content and self._blank):
            text = SEPARATOR + text
        self._fresh, self._wrote[kind] = False, True
        if kind is Content:
            self._blank = text[-1].isspace()
        read.append(kind(text))
