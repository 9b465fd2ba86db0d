"""Logprobs of prompt tokens, from the hidden states of the tokens before them.

A prompt of a few thousand tokens would have logits of gigabytes, so they are made a part at a time [logits-in-parts].
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import PromptPositions, PromptScores, SampledLogprobs
from tandem_engine.sampling.logprobs import most_likely

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
