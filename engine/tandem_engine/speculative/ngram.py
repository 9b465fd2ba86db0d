"""Prompt lookup: drafts what followed the last occurrence of the newest tokens.

The cheapest proposer: no model, no memory on the device. It helps where an output repeats its input or itself: edited
code, quoted text, tables, answers from a document. Elsewhere it finds nothing, proposes nothing, and does not even make
a step wait (`ready`).

`NgramIndex` has where the last tokens of a text have occurred before.

    latest[key]     position after the newest occurrence of each n-gram of `shortest` tokens, by its hash
    previous[i]     the occurrence before the one that ends at i, or none

A look-up walks this list from the newest occurrence backwards, over at most `CANDIDATES` of them, and takes the one
with the longest common context. Appending a token is a dictionary access; numpy appends a prompt in bulk. Nothing is
scanned twice. Hashes may collide, so contexts are compared token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem_engine.base.names import ReqPoolIdx
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.speculative.interface import DraftRequest, DraftTokens

CANDIDATES = 8
"""Occurrences that one look-up compares: bounds its time on text that repeats one n-gram without end."""

BULK = 64
"""Tokens from which appending goes through numpy."""

NOWHERE = 0
"""No n-gram ends before its first token does."""

_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


class NgramIndex:
    """The tokens of one text, growing at its end.

    Args:
        shortest: tokens that must agree for an occurrence to count.
        longest: tokens of context that are compared at most.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, f"n-grams of {shortest} to {longest} tokens"
        self._shortest = shortest
        self._longest = longest
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}
        self._previous: list[int] = []

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add `tokens` at the end."""
        if len(tokens) >= BULK:
            self._append_many(tokens)
            return
        for token in tokens:
            self._tokens.append(token)
            self._link(self._last_key())

    def continuation(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that followed the best earlier occurrence of the last tokens; () without one.

        When the occurrence overlaps the end of the text its continuation runs into itself, and what follows
        is periodic: it is continued as such.
        """
        start = self._best_occurrence()
        if start == NOWHERE:
            return ()
        period = len(self._tokens) - start
        known = self._tokens[start : start + limit]
        return tuple(known[i % period] for i in range(limit))

    def repeats(self) -> bool:
        """Whether the last tokens have occurred before."""
        return bool(self._previous) and self._best_occurrence() != NOWHERE

    def _best_occurrence(self) -> int:
        """Position after the earlier occurrence with the longest context, the newest of equals."""
        best, best_context = NOWHERE, self._shortest - 1
        at = self._previous[-1] if self._previous else NOWHERE
        for _ in range(CANDIDATES):
            if at == NOWHERE or best_context >= self._longest:
                break
            context = self._common_context(at)
            if context > best_context:
                best, best_context = at, context
            at = self._previous[at - 1]
        return best

    def _common_context(self, at: int) -> int:
        """Tokens, at most `longest`, that are the same before `at` and before the end."""
        tokens, end = self._tokens, len(self._tokens)
        for length in range(min(self._longest, at)):
            if tokens[at - 1 - length] != tokens[end - 1 - length]:
                return length
        return min(self._longest, at)

    def _last_key(self) -> int | None:
        if len(self._tokens) < self._shortest:
            return None
        key = 0
        for token in self._tokens[-self._shortest :]:
            key = (key * _PRIME + token + 1) & _MASK
        return key

    def _link(self, key: int | None) -> None:
        if key is None:
            self._previous.append(NOWHERE)
            return
        self._previous.append(self._latest.get(key, NOWHERE))
        self._latest[key] = len(self._tokens)

    def _append_many(self, tokens: Sequence[int]) -> None:
        first = len(self._tokens)
        self._tokens += tokens
        # The first of the new n-grams that lie wholly in the text ends here.
        end = max(first + 1, self._shortest)
        self._previous += [NOWHERE] * (end - 1 - first)
        keys = _keys(self._tokens[end - self._shortest :], self._shortest)
        self._previous += self._links(keys, end)
        self._latest.update(zip(keys.tolist(), range(end, end + len(keys)), strict=True))

    def _links(self, keys: npt.NDArray[np.uint64], end: int) -> list[int]:
        """The occurrence before each n-gram; `keys[i]` ends at `end + i`."""
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        previous = np.zeros(len(keys), dtype=np.int64)
        previous[order[1:][same]] = order[:-1][same] + end
        links: list[int] = previous.tolist()
        for index in np.concatenate((order[:1], order[1:][~same])).tolist():
            links[index] = self._latest.get(int(keys[index]), NOWHERE)
        return links


def _keys(tokens: Sequence[int], size: int) -> npt.NDArray[np.uint64]:
    """The hash of every n-gram of `size` tokens, as `NgramIndex` computes one."""
    values = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    count = len(values) - size + 1
    keys = np.zeros(max(0, count), dtype=np.uint64)
    for offset in range(size):
        keys = keys * np.uint64(_PRIME) + values[offset : offset + len(keys)]
    return keys


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
        """Drop the index. A request that comes back, after a retraction, has it rebuilt."""
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
