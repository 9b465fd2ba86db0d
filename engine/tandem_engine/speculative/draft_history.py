"""How much of each request a draft network has computed.

    window           covered          seq_len
      ├─ draft KV ─────┼─ to be computed ─┤
      0 for a model that needs the whole text

`covered` grows by what a proposal computes of completed text, and by the accepted drafts of the last proposal, whose
draft KV is there already. Anything else that happens to a request (a cached or handed-over prefix, a retraction,
another page for equal tokens) leaves draft KV out of place. It is detected because the request's KV is another object,
or holds other pages. Then the stamps of its pages are checked again.

`PageStamps`: a page of draft KV is a function of the tokens up to its end, like a page of KV. Its stamp is a hash of
these tokens, written with the page. A request may use a page of its own that has the stamp of its own tokens, whichever
request computed it. A page that is filled otherwise (by another worker, from another tier) keeps the stamp of what the
draft network last wrote there, which is of other tokens. So changes of owner need no notification. A collision costs
some acceptance and no token.

`WholeText` is for a draft model that needs every token: cached pages with fitting stamps are used, missing ones
computed.

`RecentText` is for a draft head, which reads the text through the target's hidden states. Each of these covers all text
before it, so the head starts on the last `longest` tokens of a request, and continues with all that follow. Where
states of earlier tokens are missing, because their KV was handed over or loaded from another tier, the window starts
after them, at a page of its own; a request that was just handed over gets drafts from its next page on. Its draft KV is
not shared: the stamps here identify the hidden states on a page.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.speculative.interface import DraftRequest

UNKNOWN = 0

EMPTY_TEXT = 1
"""Hash of the text before the first page."""


class PageStamps:
    """One stamp per page of the pool. Scheduler thread only."""

    def __init__(self, num_pages: int) -> None:
        self._stamps = [UNKNOWN] * num_pages

    def has(self, page: PageId, text: int) -> bool:
        """Whether `page` holds the tokens that hash to `text`."""
        return self._stamps[page] == text

    def write(self, page: PageId, text: int) -> None:
        """`page` holds the tokens that hash to `text`; `UNKNOWN` while it is being filled."""
        self._stamps[page] = text


def next_text(text: int, tokens: Sequence[int]) -> int:
    """Hash of a text with one more page of `tokens`."""
    return hash((text, *tokens)) or EMPTY_TEXT


Guessed: TypeAlias = Callable[[], Sequence[int]]
"""Guesses, asked for once their step has settled: before, the host might wait for a device."""


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


@dataclass(kw_only=True, slots=True)
class RecentText:
    """Implements `DraftHistory`. The stamps are those of hidden states."""

    stamps: PageStamps
    longest: int
    _sequences: dict[ReqPoolIdx, DraftSequence] = field(default_factory=dict)

    def of(self, request: DraftRequest) -> DraftSequence:
        """See `DraftHistory.of`."""
        sequence = self._sequences.get(request.kv.row)
        if sequence is None or sequence.kv is not request.kv or not sequence.current:
            window = self._window(request)
            sequence = DraftSequence(kv=request.kv, window=window, covered=window)
            self._sequences[request.kv.row] = sequence
        sequence.settle(request)
        return sequence

    def caught_up(self, sequence: DraftSequence, request: DraftRequest, guessed: Guessed) -> None:
        """See `DraftHistory.caught_up`."""
        del request
        sequence.guessed = guessed

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """Stamp the pages that the request computed, drafted for or not: requests that hit them have their states."""
        self._sequences.pop(kv.row, None)
        first = kv.computed_from // kv.page_size
        stamp_pages(self.stamps, kv.pages, token_ids, page_size=kv.page_size, first=first)

    def _window(self, request: DraftRequest) -> int:
        """Where the head starts to read: a page all of whose states, and those of all pages behind it, are here."""
        kv = request.kv
        farthest = max(0, request.seq_len - self.longest) // kv.page_size
        page = -(-kv.computed_from // kv.page_size)
        if kv.computed_from % kv.page_size == 0:
            texts = [*page_texts(request.token_ids(0, kv.computed_from), kv.page_size)]
            while page > farthest and self.stamps.has(kv.pages[page - 1], texts[page - 1]):
                page -= 1
        return max(page, farthest) * kv.page_size


@dataclass(kw_only=True, slots=True)
class WholeText:
    """Implements `DraftHistory`. The stamps are those of draft KV."""

    stamps: PageStamps
    _sequences: dict[ReqPoolIdx, DraftSequence] = field(default_factory=dict)

    def of(self, request: DraftRequest) -> DraftSequence:
        sequence = self._sequences.get(request.kv.row)
        if sequence is None or sequence.kv is not request.kv or not sequence.current:
            sequence = self._sequences[request.kv.row] = self._look_through(request)
        sequence.settle(request)
        return sequence

    def caught_up(self, sequence: DraftSequence, request: DraftRequest, guessed: Guessed) -> None:
        if not sequence.stamped:
            # Requests with the same prompt need not wait for this one's end.
            text = request.token_ids(0, sequence.adopted)
            stamp_pages(self.stamps, request.kv.pages, text, page_size=request.kv.page_size)
            sequence.stamped = True
        sequence.guessed = guessed

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """Stamp the pages: their draft KV outlives the request as long as their KV does."""
        sequence = self._sequences.pop(kv.row, None)
        if sequence is not None and sequence.kv is kv and sequence.current:
            stamp_pages(self.stamps, kv.pages, token_ids[: sequence.covered], page_size=kv.page_size)

    def _look_through(self, request: DraftRequest) -> DraftSequence:
        kv = request.kv
        # The last token is computed again in any case: what follows it is the question.
        text = request.token_ids(0, request.seq_len - 1)
        matched = 0
        for page, stamp in zip(kv.pages, page_texts(text, kv.page_size), strict=False):
            if not self.stamps.has(page, stamp):
                break
            matched += 1
        return DraftSequence(kv=kv, window=0, covered=matched * kv.page_size)
