"""History of a draft head: it looks at the last tokens only, and only at those with known hidden states.

The head reads the text through the target's hidden states, each of which knows all the text before it. So its
own attention need not reach far: it starts on the last `longest` tokens when it first meets a request, and on
all that follow. Where the states of earlier tokens are not here, because their KV was handed over by another
worker or loaded from another tier, the window starts behind them, at a page of its own; a request that was
just handed over is drafted for from its next page on.

Its draft KV is computed from the window's start and found by nobody else. What the stamps tell here is whose
hidden states are on a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import ReqPoolIdx
from tandem_engine.speculative.draft_history import DraftSequence, Guessed, page_texts, stamp_pages
from tandem_engine.speculative.interface import DraftRequest
from tandem_engine.speculative.page_stamps import PageStamps


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
        """Stamp the pages that the request computed, drafted for or not: whoever finds them cached has their states."""
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
