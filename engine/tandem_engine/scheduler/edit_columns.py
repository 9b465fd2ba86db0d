"""The logit edits of a list of requests, as the device wants them.

    `of`          what follows from parameters, slots and rows: the same while samplers and their rows stay
    `histories`   what a row that was given to its request since the last step must be told first

Which rows those are is decided by identity: every (re)admission of a request, whatever the reason, gives it a new
`RequestKv`, and the device knows the history of the holding in `req.recalled`. Nothing is in flight then, so
what the host knows is everything [device-history] [history-rebuilt].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem_engine.forward.logit_edits import ANY, BadWords, History, LogitEdits, Penalties, TokenBiases, TokenSets
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.penalty_slots import PenaltySlots
from tandem_engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class EditColumns:
    """Edits of samplers, in their order."""

    edits: LogitEdits | None
    """Without histories; None when nobody asks."""
    recalling: tuple[Request, ...] = ()
    """Samplers whose edits depend on their tokens."""

    @staticmethod
    def of(samplers: Sequence[Request], slots: PenaltySlots) -> "EditColumns":
        """Requests that need a slot get one."""
        if not any(req.sampling.edits_logits for req in samplers):
            return NO_EDITS
        numbered = [(index, req) for index, req in enumerate(samplers) if req.sampling.edits_logits]
        return EditColumns(
            edits=LogitEdits(
                penalties=_penalties(numbered, slots),
                biases=_biases(numbered),
                allowed=_pairs([(index, token) for index, req in numbered for token in req.sampling.allowed_token_ids]),
                forbidden=_pairs(
                    [(index, word[0]) for index, req in numbered for word in req.sampling.bad_words if len(word) == 1]
                ),
                bad_words=_bad_words(numbered),
            ),
            recalling=tuple(req for _, req in numbered if req.sampling.recalls_tokens),
        )

    @property
    def stale(self) -> bool:
        """Some request has moved to a row that does not know its tokens: slots and rows here may be old ones."""
        return any(req.recalled is not req.kv for req in self.recalling)

    def with_histories(self) -> LogitEdits | None:
        """The edits of the next step. What it tells the device now, it will not tell again."""
        if not self.stale:
            return self.edits
        assert self.edits is not None, "only requests with edits recall tokens"
        moved = [req for req in self.recalling if req.recalled is not req.kv]
        return replace(self.edits, histories=tuple(_recall(req) for req in moved))


NO_EDITS = EditColumns(edits=None)


def _recall(req: Request) -> History:
    assert not req.tokens_in_flight, f"request {req.rid} moved with {req.tokens_in_flight} tokens in flight"
    req.recalled = req.held_kv
    return History(
        row=req.held_kv.row,
        slot=req.penalty_slot,
        prompt_ids=req.origin_input_ids if req.sampling.repetition_penalty != 1.0 else (),
        output_ids=tuple(req.output_ids),
    )


Numbered = Sequence[tuple[int, Request]]
"""Samplers with edits, and their places among the samplers."""


def _penalties(numbered: Numbered, slots: PenaltySlots) -> Penalties | None:
    penalised = [(index, req) for index, req in numbered if req.sampling.penalised]
    if not penalised:
        return None
    params = [req.sampling for _, req in penalised]
    return Penalties(
        index=_ints([index for index, _ in penalised]),
        slots=_ints([slots.of(req) for _, req in penalised]),
        repetition=_floats([p.repetition_penalty for p in params]),
        frequency=_floats([p.frequency_penalty for p in params]),
        presence=_floats([p.presence_penalty for p in params]),
    )


def _biases(numbered: Numbered) -> TokenBiases | None:
    biases = [(index, token, bias) for index, req in numbered for token, bias in req.sampling.logit_bias]
    if not biases:
        return None
    indices, tokens, values = zip(*biases, strict=True)
    return TokenBiases(index=_ints(indices), token_ids=_ints(tokens), values=_floats(values))


def _pairs(pairs: Sequence[tuple[int, int]]) -> TokenSets | None:
    if not pairs:
        return None
    indices, tokens = zip(*pairs, strict=True)
    return TokenSets(index=_ints(indices), token_ids=_ints(tokens))


def _bad_words(numbered: Numbered) -> BadWords | None:
    words = [(index, req, word) for index, req in numbered for word in sequences(req.sampling)]
    if not words:
        return None
    longest = max(len(word) for _, _, word in words) - 1
    prefixes = np.full((len(words), longest), ANY, dtype=np.int64)
    for line, (_, _, word) in zip(prefixes, words, strict=True):
        line[longest + 1 - len(word) :] = word[:-1]
    recalled = {index: req for index, req, _ in words}
    return BadWords(
        index=_ints([index for index, _, _ in words]),
        rows=_ints([req.held_kv.row for _, req, _ in words]),
        prefixes=torch.from_numpy(prefixes),
        last=_ints([word[-1] for _, _, word in words]),
        recalled_index=_ints([*recalled]),
        recalled_rows=_ints([req.held_kv.row for req in recalled.values()]),
    )


def sequences(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Bad words of more than one token."""
    return [word for word in sampling.bad_words if len(word) > 1]


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
