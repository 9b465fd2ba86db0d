"""Proposers that know the answer, and get it wrong on purpose."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.interface import DraftRequest, DraftTokens
from tandem_testing.fake_executor import next_token

Mistake = Callable[[int], bool]
"""Position of a draft → whether it is wrong."""


def always_right(position: int) -> bool:
    return False


def always_wrong(position: int) -> bool:
    return True


def wrong_every(period: int) -> Mistake:
    return lambda position: position % period == 0


def wrong_at_random(seed: int) -> Mistake:
    dice = random.Random(seed)
    return lambda _position: dice.random() < 0.4


@dataclass(frozen=True)
class Script:
    """The whole text of a request, known in advance."""

    sampling: SamplingParams
    text: list[int]

    def next(self, history: list[int], sampling: SamplingParams) -> int | None:
        """What follows `history`, if this is its text and it continues."""
        known = len(history) < len(self.text) and self.text[: len(history)] == history
        return self.text[len(history)] if known and sampling == self.sampling else None


@dataclass(kw_only=True)
class ScriptedProposer:
    """Implements `Proposer` for the fake model, whose next token is known in advance."""

    vocab_size: int
    scripts: Sequence["Script"] = ()
    """What requests whose logits are edited will say; all others are what the model says by itself."""
    mistake: Mistake = always_right
    lengths: Callable[[int], int] = lambda limit: limit
    """Drafts proposed out of a limit."""
    name: str = "SCRIPTED"
    writes_kv: bool = False
    proposals: list[DraftTokens] = field(default_factory=list)
    released: list[tuple[RequestKv, list[int]]] = field(default_factory=list)

    def ready(self, request: DraftRequest) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        for request in requests:
            assert request.limit > 0
            assert len(request.token_ids(0, request.seq_len)) == request.seq_len
            if self.writes_kv:
                assert request.kv.allocated_len >= request.seq_len + request.limit
        drafts = DraftTokens(tuple(self._chain(request) for request in requests))
        self.proposals.append(drafts)
        return drafts

    def release(self, kv: RequestKv, token_ids: Sequence[int]) -> None:
        assert not kv.released
        assert len(token_ids) == kv.committed_len
        self.released.append((kv, list(token_ids)))

    def _chain(self, request: DraftRequest) -> tuple[int, ...]:
        history = list(request.token_ids(0, request.seq_len))
        for _ in range(self.lengths(request.limit)):
            history.append(self._draft(history, request))
        return tuple(history[request.seq_len :])

    def _draft(self, history: list[int], request: DraftRequest) -> int:
        token = self._answer(history, request)
        return (token + 1) % self.vocab_size if self.mistake(len(history)) else token

    def _answer(self, history: list[int], request: DraftRequest) -> int:
        known = (script.next(history, request.sampling) for script in self.scripts)
        token = next((token for token in known if token is not None), None)
        if token is not None:
            return token
        noise = None if request.sampling.greedy else (request.sampling.seed, len(history))
        return next_token(history, vocab_size=self.vocab_size, noise=noise)
