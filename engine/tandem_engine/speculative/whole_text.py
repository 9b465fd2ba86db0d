"""History of a draft model that needs every token before the one it guesses.

Pages of a cached prefix whose stamps fit are taken as they are; what is missing is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import ReqPoolIdx
from tandem_engine.speculative.draft_history import DraftSequence, Guessed, page_texts, stamp_pages
from tandem_engine.speculative.interface import DraftRequest
from tandem_engine.speculative.page_stamps import PageStamps


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
