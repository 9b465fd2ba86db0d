"""Cutting a prompt that is too long to a number of tokens."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

TruncationSide = Literal["left", "right"]
"""The end that is cut off: `left` keeps the newest tokens."""


class Truncation(NamedTuple):
    tokens: int
    """At most so many stay: at least 1."""
    side: TruncationSide

    def of(self, ids: Sequence[int]) -> tuple[int, ...]:
        kept = ids[-self.tokens :] if self.side == "left" else ids[: self.tokens]
        return tuple(kept)
