"""Where an answer is shown: rendered on a terminal, wrapped on one without control codes, unchanged in a pipe.

Markdown of a model becomes lines for a terminal block by block. Text that arrives later never changes a block that is
followed by another one, so that all blocks but the last can be printed for good.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Protocol, TextIO

# Loaded before a request is sent: later, it would count as time to the first token.
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment, SegmentLines
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tandem_services.cli.chat.conversation import Piece

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""All but tab and newline, and halves of characters, which no terminal's encoding has."""


def harmless(text: str) -> str:
    """`text` with U+FFFD for each control code: whatever a model writes moves no cursor and sets no title."""
    return _CONTROLS.sub("�", text.replace("\r\n", "\n"))


class WordWrap:
    """Breaks lines of a stream between words, at `width` columns; a longer word is broken at the end of the line."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._space = ""
        """Before the word."""
        self._word = ""

    def add(self, text: str) -> str:
        """What can be written now: all but the word at the end, which may have more letters in the next chunk."""
        written = []
        for part in re.split(r"(\s)", text):
            if not part.isspace():
                self._word += part
                continue
            written.append(self._place_word())
            if part == "\n":
                written.append("\n")
                self._column, self._space = 0, ""
            else:
                self._space += " " if part == "\t" else part
        return "".join(written)

    def end(self) -> str:
        """The word at the end."""
        return self._place_word()

    def _place_word(self) -> str:
        word, space, self._word = self._word, self._space, ""
        if not word:
            return ""
        self._space = ""
        if self._column + cell_len(space) + cell_len(word) <= self._width:
            self._column += cell_len(space) + cell_len(word)
            return space + word
        pieces = chop_cells(word, self._width)
        self._column, before = cell_len(pieces[-1]), "\n" if self._column else ""
        return before + "\n".join(pieces)


Line = list[Segment]

# Tags and definitions of links are text: what a model writes is shown, not dropped.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class _LeftHeading(Heading):
    """Where the text begins: in the middle of a wide terminal it would be far from it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Answer(Markdown):
    """Lines stay as the model has broken them, and the address of a link is visible."""

    elements = Markdown.elements | {"heading_open": _LeftHeading}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.markup = text
        self.parsed = _PARSER.parse(text)
        for token in _inline(self.parsed):
            if token.type == "softbreak":
                token.type = "hardbreak"


def _inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield from token.children or ()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks that are complete, and the rest: the last block, which may continue."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.nesting >= 0 and token.map]
    lines = re.split(r"(?<=\n)", text)
    bounds = [0, *starts[1:]]
    blocks = ["".join(lines[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return blocks, "".join(lines[bounds[-1] :])


def render(console: Console, text: str) -> list[Line]:
    """Lines of one block, without blank ones around it and without spaces at the end of a line."""
    return trim(console.render_lines(_Answer(text), pad=False))


def trim(lines: list[Line]) -> list[Line]:
    """Without blank lines at both ends, and without spaces at the end of each."""
    trimmed = [_trim_end(line) for line in lines]
    filled = [number for number, line in enumerate(trimmed) if line]
    return trimmed[filled[0] : filled[-1] + 1] if filled else []


def _trim_end(line: Line) -> Line:
    """Spaces with a background are a part of the picture."""
    line = [*line]
    while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
        line.pop()
    if line and not (line[-1].style and line[-1].style.bgcolor):
        line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
    return line


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
