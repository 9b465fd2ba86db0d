"""Prompt lookup: what followed the last time these words occurred will follow again.

The cheapest proposer: no model, no memory on the device. It is right where an output repeats its input or
itself: code that is edited, text that is quoted, tables, answers from a document. Elsewhere it finds
nothing, proposes nothing, and does not even make a step wait (`ready`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.names import ReqPoolIdx
from tandem_engine.speculative.interface import DraftRequest, DraftTokens
from tandem_engine.speculative.ngram_index import NgramIndex


@dataclass(kw_only=True, slots=True)
class NgramProposer:
    """Implements `Proposer`."""

    shortest: int
    longest: int
    name: str = "NGRAM"
    writes_kv: bool = False
    _indices: dict[ReqPoolIdx, NgramIndex] = field(default_factory=dict)

    def ready(self, request: DraftRequest) -> bool:
        """Whether the settled text ends in something that occurred before.

        The token in flight may break the repetition; mostly it continues it.
        """
        return self._index(request).repeats()

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        """What followed the longest repeated context of each text."""
        return DraftTokens(tuple(self._index(request).continuation(request.limit) for request in requests))

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        """Drop the index. A request that comes back, after a retraction, has it built anew."""
        del token_ids
        self._indices.pop(kv.row, None)

    def _index(self, request: DraftRequest) -> NgramIndex:
        """The index of a request, brought up to its newest settled token."""
        index = self._indices.get(request.kv.row)
        if index is None:
            index = NgramIndex(shortest=self.shortest, longest=self.longest)
            self._indices[request.kv.row] = index
        index.append(request.token_ids(len(index), request.seq_len))
        return index
