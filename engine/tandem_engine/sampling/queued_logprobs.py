"""Logprobs for a device, sampled or of the prompt: the numbers of `logprobs` and `prompt_logprobs`.

The most likely tokens come best first, the lower id first among equals. Which of equals `topk` finds is its own
choice, and to look at them takes a number of the device's. So what is ranked here is no logprob but a whole number
that no two tokens share: the logprob's bits, in the order of their values, above the complement of the id.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import PromptPositions, PromptScores, SampledLogprobs
from tandem_engine.forward.outcome import Outcome
from tandem_engine.sampling.prompt_logprobs import MAX_ROWS

ID_BITS = 32
ALL_IDS = (1 << ID_BITS) - 1
BELOW_SIGN = 0x7FFFFFFF


def queue_sampled(
    logits: Tensor, token_ids: Tensor, wanted: tuple[int, ...], named: Tensor | None = None
) -> Outcome[tuple[SampledLogprobs | None, ...]]:
    """As `sampled_logprobs`, for all rows of `logits` [S, V] at once; `wanted` by row, −1 for nobody; `named` [R, K]
    on their device."""
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    values, ids = most_likely(logprobs, max(wanted))
    if named is None:
        named = token_ids.new_empty((len(token_ids), 0))
    asked = logprobs.gather(1, named.clamp(min=0))

    def read(tensors: Sequence[Tensor]) -> tuple[SampledLogprobs | None, ...]:
        rows = zip(wanted, *(tensor.tolist() for tensor in tensors), strict=True)
        return tuple(
            None
            if count < 0
            else SampledLogprobs(logprob=logprob, top=_named(named, asked) or _top(ids, values, count))
            for count, logprob, values, ids, named, asked in rows
        )

    return Outcome((chosen, values, ids, named, asked), read)


def queue_prompt_scores(
    hidden: Tensor, wanted: Sequence[PromptPositions], project: Callable[[Tensor], Tensor]
) -> Outcome[tuple[PromptScores, ...]]:
    """As `prompt_scores`."""
    parts = torch.split(hidden, [len(positions.tokens) for positions in wanted]) if wanted else ()
    tensors = [
        tensor for positions, rows in zip(wanted, parts, strict=True) for tensor in _score(rows, positions, project)
    ]

    def read(copies: Sequence[Tensor]) -> tuple[PromptScores, ...]:
        return tuple(
            PromptScores(
                sequence=positions.sequence,
                first=positions.first,
                logprobs=_read_scores(copies[4 * index : 4 * index + 4], positions.top),
            )
            for index, positions in enumerate(wanted)
        )

    return Outcome(tuple(tensors), read)


def most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of [S, V] float32, in order: values and ids [S, count], or as many as there are."""
    # Both zeros are one value, with one pattern of bits.
    bits = (logprobs + 0.0).view(torch.int32)
    in_order = bits ^ ((bits >> 31) & BELOW_SIGN)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    ranks = (in_order.long() << ID_BITS) | (ALL_IDS - ids)
    best = ALL_IDS - (ranks.topk(min(max(count, 0), logprobs.shape[1]), dim=1).values & ALL_IDS)
    return logprobs.gather(1, best), best


def _score(hidden: Tensor, positions: PromptPositions, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """[N] logprob and rank of each token, [N, top] the most likely and their ids; a part of the logits at a time."""
    parts = []
    for rows, token_ids in zip(torch.split(hidden, MAX_ROWS), torch.split(positions.token_ids, MAX_ROWS), strict=True):
        logprobs = project(rows).log_softmax(dim=1)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=1) + 1
        parts.append((chosen.squeeze(1), ranks, *most_likely(logprobs, positions.top)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _read_scores(tensors: Sequence[Tensor], count: int) -> tuple[SampledLogprobs, ...]:
    rows = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    return tuple(
        SampledLogprobs(logprob=logprob, top=_top(ids, values, count), rank=rank) for logprob, rank, values, ids in rows
    )


def _named(ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """() for a row that names no tokens."""
    return tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)


def _top(ids: Sequence[int], values: Sequence[float], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:count], values[:count], strict=True))
