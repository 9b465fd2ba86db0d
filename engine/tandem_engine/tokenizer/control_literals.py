"""Keeping control tokens out of user text while the chat template's own stay real.

    1. mark     every control literal inside a user string is wrapped in two marks drawn at random
    2. render   the template sees the user's strings otherwise unchanged
    3. split    the text between marks is encoded as plain text, all the rest with control tokens

Only strings that contain a control literal differ from what Hugging Face would encode, and templates that
look into contents (`startswith`, `trim`, …) work as written. A string's end that could be completed to a
literal by what the template puts next to it is marked too. The marks cannot be guessed, so they cannot be
forged.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """A run of rendered text. `plain`: it must not yield control tokens."""

    text: str
    plain: bool


class Marks(NamedTuple):
    """Begin and end of plain text in one rendering. Noncharacters survive trimming and JSON."""

    begin: str
    end: str


def draw_marks() -> Marks:
    nonce = secrets.token_hex(8)
    return Marks(f"\ufdd0{nonce}\ufdd1", f"\ufdd2{nonce}\ufdd3")


class ControlLiterals:
    """Finds the literals of one tokenizer in text. Immutable."""

    def __init__(self, literals: Sequence[str]) -> None:
        ordered = sorted(literals, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._heads = frozenset(text[:i] for text in literals for i in range(1, len(text)))
        self._tails = frozenset(text[i:] for text in literals for i in range(1, len(text)))
        self._longest = max(map(len, literals), default=0)

    def mark(self, value: Any, marks: Marks) -> Any:
        """A copy of a JSON-like value with the literals of all its strings marked, keys included: those of a tool's
        schema are a user's text as well. Keys that templates look up hold no literal and stay as they are."""
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, Mapping):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item, marks) for item in value]
        return value

    def _mark_text(self, text: str, marks: Marks) -> str:
        start, stop = self._completable_start(text), len(text) - self._completable_end(text)
        if start >= stop:
            return f"{marks.begin}{text}{marks.end}" if start or stop < len(text) else text
        inner = self._pattern.sub(lambda match: f"{marks.begin}{match[0]}{marks.end}", text[start:stop])
        head = f"{marks.begin}{text[:start]}{marks.end}" if start else ""
        tail = f"{marks.begin}{text[stop:]}{marks.end}" if stop < len(text) else ""
        return head + inner + tail

    def _completable_start(self, text: str) -> int:
        lengths = range(min(len(text), self._longest - 1), 0, -1)
        return next((length for length in lengths if text[:length] in self._tails), 0)

    def _completable_end(self, text: str) -> int:
        lengths = range(min(len(text), self._longest - 1), 0, -1)
        return next((length for length in lengths if text[-length:] in self._heads), 0)


def split_marked(text: str, marks: Marks) -> Iterator[Segment]:
    """Segments of a rendered text, without its marks. What is marked is never empty."""
    while text:
        before, begin, rest = text.partition(marks.begin)
        inside, _, after = rest.partition(marks.end)
        if before:
            yield Segment(before, plain=False)
        if begin:
            yield Segment(inside, plain=True)
        text = after
