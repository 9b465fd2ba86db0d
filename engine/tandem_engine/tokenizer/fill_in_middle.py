"""Tokens with which code models fill in the text between a prefix and a suffix.

prefix first   PRE prefix SUF suffix MID      Qwen2.5-Coder, StarCoder, CodeLlama, DeepSeek-Coder, CodeGemma
suffix first   SUF suffix PRE prefix [MID]    Codestral, Seed-Coder
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class _Family(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    end: str | None = None


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", end="▁<EOT>"),
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)


class FimMarks(NamedTuple):
    """Token ids of one tokenizer's marks."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    end: int | None
    """Ends the middle, beside the end-of-sequence tokens."""

    def around(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """A prompt that asks for what stands between `prefix` and `suffix`."""
        marked = [[self.prefix, *prefix], [self.suffix, *suffix]]
        first, second = reversed(marked) if self.suffix_first else marked
        return [*first, *second, *(() if self.middle is None else (self.middle,))]


def find_fim_marks(token_of: Callable[[str], int | None]) -> FimMarks | None:
    """The marks that a vocabulary has; None without any. `token_of`: the id of an added token."""
    for family in _FAMILIES:
        prefix, suffix = token_of(family.prefix), token_of(family.suffix)
        middle = None if family.middle is None else token_of(family.middle)
        if prefix is None or suffix is None or (middle is None and family.middle is not None):
            continue
        end = None if family.end is None else token_of(family.end)
        return FimMarks(prefix, suffix, middle, family.suffix_first, end)
    return None
