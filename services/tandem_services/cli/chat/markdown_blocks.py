"""Markdown of a model as lines for a terminal, block by block.

Text that arrives later never changes a block that is followed by another one, so that all blocks but the last can be
printed for good.
"""

import itertools
import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.segment import Segment

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
