"""Text for terminals: without control codes, wrapped by words."""

import re

from rich.cells import cell_len, chop_cells

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
        """What can be written now: all but the last word, which may have more letters in the next chunk."""
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
        """The last word."""
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
