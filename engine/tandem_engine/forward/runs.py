"""Steps with drafts: a sequence samples after each token of a run, and edits know the drafts before each.

Without drafts in a step every function here gives back what it was given, for the price of a comparison.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch, SamplingBatch

NO_DRAFT = -1
"""Behind the last token of a shorter run."""


def sampled_tokens(batch: ForwardBatch) -> Tensor:
    """[R] the index among the step's tokens of each token that another is sampled after."""
    if batch.num_extend == 0:
        return batch.sample_index
    last = batch.extend_lens.cumsum(0)[batch.sample_index] - 1
    if not batch.draft_lens:
        return last
    runs = _run_lens(batch)
    behind = (runs.cumsum(0) - 1).repeat_interleave(runs) - torch.arange(int(runs.sum()))
    return last.repeat_interleave(runs) - behind


def wanted_tokens(batch: ForwardBatch) -> Tensor:
    """Indices among the step's tokens of those whose hidden states are needed: sampled after, then predicting wanted
    prompt tokens, then to be pooled.
    """
    sampled = sampled_tokens(batch)
    if not batch.prompt_positions and not batch.pooled:
        return sampled
    scored = (positions.tokens for positions in batch.prompt_positions)
    return torch.cat((sampled, *scored, *(pooled.tokens for pooled in batch.pooled)))


def over_runs(batch: ForwardBatch) -> SamplingBatch:
    """The sampling of `batch` with its edits by row, [R], as the other columns are."""
    sampling = batch.sampling
    if not batch.draft_lens or sampling.edits is None:
        return sampling
    return replace(sampling, edits=sampling.edits.over_runs(_run_lens(batch)))


def drafts_ahead(batch: ForwardBatch) -> Tensor | None:
    """[R, K] the drafts before each row, `NO_DRAFT` behind them; None when no edit would look at them."""
    edits = batch.sampling.edits
    if not batch.draft_lens or edits is None or (edits.penalties is None and edits.bad_words is None):
        return None
    lines = [
        [*chain[:count], *[NO_DRAFT] * (max(batch.draft_lens) - count)]
        for chain in drafts_of(batch)
        for count in range(len(chain) + 1)
    ]
    return torch.tensor(lines, dtype=torch.int64)


def drafts_of(batch: ForwardBatch) -> tuple[tuple[int, ...], ...]:
    """The drafts among the input ids of `batch`, on the host, for each sampling sequence. Waits for guesses."""
    ids = batch.input_ids.tolist()
    if batch.guessed is not None:
        for place, token in batch.guessed.known():
            ids[place] = token
    ends = batch.extend_lens.cumsum(0)[batch.sample_index].tolist()
    return tuple(tuple(ids[end - count : end]) for end, count in zip(ends, batch.draft_lens, strict=True))


def _run_lens(batch: ForwardBatch) -> Tensor:
    return torch.tensor(batch.draft_lens) + 1
