"""Logprobs of sampled tokens, and of prompt tokens.

They are raw, vLLM's default: log_softmax of the model's logits, before any edit, temperature and filter. Those of a
prompt token come from the hidden state of the token before it. A prompt of a few thousand tokens would have gigabytes
of logits, so they are computed a part at a time [logits-in-parts].
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tandem_engine.forward.batch import PromptPositions, PromptScores, SampledLogprobs


def sampled_logprobs(
    logits: Tensor, token_ids: Tensor, wanted: tuple[int, ...], named: Tensor | None = None
) -> tuple[SampledLogprobs | None, ...]:
    """Logprob of each sampled token and of the most likely ones.

    Args:
        logits: [S, V] float32, raw.
        token_ids: [S] int64, what was sampled.
        wanted: per row, how many of the most likely tokens to report; −1 for nothing at all.
        named: as `SamplingBatch.logprob_ids`.
    """
    result: list[SampledLogprobs | None] = [None] * len(wanted)
    rows = [row for row, count in enumerate(wanted) if count >= 0]
    logprobs = logits[rows].log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[rows][:, None]).squeeze(1).tolist()
    for index, row in enumerate(rows):
        ids = () if named is None else [token for token in named[row].tolist() if token >= 0]
        top = _of(logprobs[index], ids) if ids else most_likely(logprobs[index], wanted[row])
        result[row] = SampledLogprobs(logprob=chosen[index], top=top)
    return tuple(result)


def _of(logprobs: Tensor, ids: Sequence[int]) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids, logprobs[[*ids]].tolist(), strict=True))


def most_likely(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` best (token id, logprob) of one row, best first, the lower id first among equals."""
    if count == 0:
        return ()
    # topk orders equals as it likes, so it only tells how good one must be.
    worst = logprobs.topk(min(count, len(logprobs))).values[-1]
    ids = (logprobs >= worst).nonzero().squeeze(1)
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))


MAX_ROWS = 256
"""Rows of logits that exist at once."""


def prompt_scores(
    hidden: Tensor, wanted: Sequence[PromptPositions], project: Callable[[Tensor], Tensor]
) -> tuple[PromptScores, ...]:
    """Score the tokens of `wanted`.

    Args:
        hidden: [ΣN, hidden_size] of the tokens `wanted` names, in that order.
        project: hidden states [R, hidden_size] to float32 logits [R, V], R ≤ `MAX_ROWS`.
    """
    if not wanted:
        return ()
    sizes = [len(positions.tokens) for positions in wanted]
    return tuple(
        PromptScores(
            sequence=positions.sequence,
            first=positions.first,
            logprobs=tuple(_scores(rows, positions, project)),
        )
        for positions, rows in zip(wanted, torch.split(hidden, sizes), strict=True)
    )


def _scores(
    hidden: Tensor, positions: PromptPositions, project: Callable[[Tensor], Tensor]
) -> Iterator[SampledLogprobs]:
    parts = zip(torch.split(hidden, MAX_ROWS), torch.split(positions.token_ids, MAX_ROWS), strict=True)
    for rows, token_ids in parts:
        logprobs = project(rows).log_softmax(dim=1)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=1) + 1
        for row, logprob, rank in zip(logprobs, chosen.squeeze(1).tolist(), ranks.tolist(), strict=True):
            yield SampledLogprobs(logprob=logprob, top=most_likely(row, positions.top), rank=rank)
