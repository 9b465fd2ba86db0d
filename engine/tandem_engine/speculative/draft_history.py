"""How much of each request a draft model has computed.

    window           covered          seq_len
      ├─ draft KV ─────┼─ to be computed ─┤
      0 for a model that needs the whole text

`covered` grows by what a proposal computes of settled text, and by the guesses of the last proposal that
turned out right: their draft KV is there already. Everything else that a request can go through, a prefix
that was cached or handed over, a retraction, another page for equal tokens, comes down to draft KV that is
not where it should be, and is noticed in one of two ways: the request's KV is another object, or it holds
other pages. Then its pages are looked through anew, by their stamps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import PageId
from tandem_engine.speculative.interface import DraftRequest
from tandem_engine.speculative.page_stamps import EMPTY_TEXT, UNKNOWN, PageStamps, next_text

Guessed: TypeAlias = Callable[[], Sequence[int]]
"""Guesses, asked for once their step has settled: before, somebody might wait for a device."""


@dataclass(kw_only=True, slots=True)
class DraftSequence:
    """What the draft model has of one request, as long as that keeps its KV."""

    kv: RequestKv
    window: int
    covered: int
    """Settled tokens before this one, from `window` on, have draft KV."""
    guessed: Guessed = tuple
    """Tokens from `covered` on whose draft KV was computed as guesses."""
    stamped: bool = False
    """Whether others can find what was computed of its cached pages."""
    adopted: int = field(init=False)
    """`kv.cache_protected_len` when the pages were looked through: where it moves, pages may have changed."""

    def __post_init__(self) -> None:
        self.adopted = self.kv.cache_protected_len

    @property
    def current(self) -> bool:
        return not self.kv.released and self.adopted == self.kv.cache_protected_len

    def look_again(self) -> None:
        """What is on its pages is about to change: do not trust what was found there."""
        self.adopted = -1

    def settle(self, request: DraftRequest) -> None:
        """Count the guesses that have become text."""
        guessed, self.guessed = self.guessed(), tuple
        text = request.token_ids(self.covered, min(self.covered + len(guessed), request.seq_len))
        for guess, token in zip(guessed, text, strict=False):
            if guess != token:
                break
            self.covered += 1


class DraftHistory(Protocol):
    """Sequences by row. Scheduler thread only."""

    def of(self, request: DraftRequest) -> DraftSequence:
        """The sequence of `request`, its guesses settled; from what its pages hold if it is new here."""
        ...

    def caught_up(self, sequence: DraftSequence, request: DraftRequest, guessed: Guessed) -> None:
        """Draft KV of all of `request` was computed, and behind it that of `guessed`."""
        ...

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """`kv`, holding `token_ids`, is about to be given back."""
        ...


def page_texts(token_ids: Sequence[int], page_size: int) -> Iterator[int]:
    """For each page that `token_ids` fill, the hash of the text up to its end."""
    text = EMPTY_TEXT
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        text = next_text(text, token_ids[start : start + page_size])
        yield text


def stamp_pages(
    stamps: PageStamps, pages: Sequence[PageId], token_ids: Sequence[int], *, page_size: int, first: int = 0
) -> None:
    """Stamp `pages[first:]`: those that `token_ids` fill with their text, the others as unknown."""
    texts = [*page_texts(token_ids, page_size)]
    for index in range(first, len(pages)):
        stamps.write(pages[index], texts[index] if index < len(texts) else UNKNOWN)
