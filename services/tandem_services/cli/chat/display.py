"""Where an answer is shown: rendered on a terminal, wrapped on one without control codes, unchanged in a pipe."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Protocol, TextIO

# Loaded before a request is sent: later, it would count as time to the first token.
from rich.console import Console
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from tandem_services.cli.chat.markdown_blocks import Line, render, split_blocks, trim
from tandem_services.cli.chat.plain_text import WordWrap, harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tandem_services.cli.chat.conversation import Piece

DEFAULT_COLUMNS = 80
"""Of a terminal that has not reported its size."""

FRAMES_PER_S = 8
"""How often the block that grows is drawn."""

Show = Callable[["Piece"], None]
"""Takes the next piece of an answer."""


class Display(Protocol):
    """Of all answers of a conversation."""

    def answer(self) -> AbstractContextManager[Show]:
        """Shows what is given in the block; at its end the cursor is at the beginning of a line."""

    def note(self, text: str) -> None:
        """Something about the answer."""


def display_for(stream: TextIO) -> Display:
    # rich itself would write colors into pipes if environment variables request them.
    if not stream.isatty():
        return Pipe(stream)
    console = Console(file=stream, highlight=False)
    return Wrapped(stream) if console.is_dumb_terminal else Rendered(console)


class Pipe:
    """The answer as it is; no reasoning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def answer(self) -> Iterator[Show]:
        try:
            yield lambda piece: self._write(harmless(piece.content))
        finally:
            self._write("\n")

    def note(self, text: str) -> None:
        self._write(f"[{harmless(text)}]\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Wrapped:
    """A terminal without control codes: text wrapped by words; of reasoning a line that it takes place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def _width(self) -> int:
        """rich takes 80 columns for such a terminal, whatever it has."""
        return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_COLUMNS

    @contextmanager
    def answer(self) -> Iterator[Show]:
        words = WordWrap(self._width)
        reasons = False

        def show(piece: "Piece") -> None:
            nonlocal reasons
            if piece.reasoning and not reasons:
                self._write("(reasoning …)\n")
                reasons = True
            self._write(words.add(harmless(piece.content)))

        try:
            yield show
        finally:
            self._write(f"{words.end()}\n")

    def note(self, text: str) -> None:
        self._write("\n".join(wrap(f"[{harmless(text)}]", self._width)) + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Rendered:
    """Markdown. Complete blocks are printed; the last one is drawn again while it grows."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    @contextmanager
    def answer(self) -> Iterator[Show]:
        growing = _Growing(self._console)
        with Live(
            get_renderable=growing.tail,
            console=self._console,
            refresh_per_second=FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            try:
                yield growing.add
            finally:
                growing.end()

    def note(self, text: str) -> None:
        self._console.print(Text(harmless(text), style="dim"))


class _Growing:
    """One answer: what is printed, and the text of the block that is not."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._reasoning = ""
        self._content = ""
        self._printed = False
        """A block, which is followed by a blank line."""

    def add(self, piece: "Piece") -> None:
        if piece.reasoning:
            self._reasoning += harmless(piece.reasoning)
        if not piece.content:
            return
        self._end_reasoning()
        self._content += harmless(piece.content)
        if "\n" in piece.content:
            blocks, self._content = split_blocks(self._content)
            for block in blocks:
                self._print(self._content_lines(block))

    def end(self) -> None:
        """Nothing more arrives."""
        self._end_reasoning()
        rest, self._content = self._content, ""
        self._print(self._content_lines(rest))

    def tail(self) -> "RenderableType":
        """As many of the last lines of the block that grows as the terminal has."""
        lines = self._content_lines(self._content) if self._content else self._reasoning_lines(self._reasoning)
        lines = lines[-max(1, self._console.height - 2) :]
        return SegmentLines([[], *lines] if lines and self._printed else lines, new_lines=True)

    def _end_reasoning(self) -> None:
        reasoning, self._reasoning = self._reasoning, ""
        self._print(self._reasoning_lines(reasoning))

    def _print(self, lines: "list[Line]") -> None:
        if lines:
            self._console.print(SegmentLines([[], *lines] if self._printed else lines, new_lines=True), end="")
            self._printed = True

    def _content_lines(self, text: str) -> "list[Line]":
        return render(self._console, text)

    def _reasoning_lines(self, text: str) -> "list[Line]":
        return trim(self._console.render_lines(Text(text, style="dim"), pad=False))
