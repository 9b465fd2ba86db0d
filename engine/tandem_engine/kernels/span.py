"""Which tokens a token sees. No torch: processes that compile kernels import it."""

from typing import NamedTuple


class Span(NamedTuple):
    """Which tokens a token sees, up to itself: the newest ones, or those of its chunk."""

    tokens: int
    """Of the window, or of each chunk of a sequence."""
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """The oldest position that the token at `position` sees."""
        return position - position % self.tokens if self.chunked else max(position + 1 - self.tokens, 0)
