"""Sampling on a device: edits of a step as the kernels take them, by row. Importing this module requires Triton.

    raw logits ─▶ `edit_rows` ─▶ biases, bad words, suppressed ids: few logits ─▶ `sample_rows` ─▶ token ids

`edit_rows` applies in one pass what touches whole rows: penalties, grammars, allowed tokens. Biases come after it, not
before the allowed tokens as in `logits_processor`: a token that is not allowed is −inf, with a bias or without.
"""

import torch
from torch import Tensor

from tandem_engine.forward.batch import SamplingBatch
from tandem_engine.forward.logit_edits import Penalties, TokenSets
from tandem_engine.kernels.triton.penalties import RowMasks, RowPenalties, edit_logits
from tandem_engine.kernels.triton.sampling import sample


def sample_rows(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Token ids [R] int64 of edited logits [R, V] float32, −1 where the best logit is NaN or +infinity."""
    return sample(
        logits,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=sampling.position,
        all_greedy=sampling.all_greedy,
    )


def edit_rows(
    logits: Tensor,
    *,
    penalties: RowPenalties | None = None,
    masks: tuple[Tensor, Tensor] | None = None,
    allowed: TokenSets | None = None,
) -> Tensor:
    """A copy of `logits` [S, V] with what touches whole rows.

    Args:
        penalties: see `penalties_by_row`.
        masks: rows [G] and packed bits [G, words] int32 of the rows with a grammar.
        allowed: what the rows it names may choose from.
    """
    bits = None if masks is None else RowMasks(index=_places(masks[0], logits), masks=masks[1])
    return edit_logits(
        logits, penalties, bits=bits, allowed=None if allowed is None else _allowed_masks(allowed, logits)
    )


def penalties_by_row(
    penalties: Penalties, counts: Tensor, in_prompt: Tensor, logits: Tensor, ahead: Tensor | None = None
) -> RowPenalties:
    """Penalties of some rows of `logits`, for all of them. `ahead` as in `PenaltyRows.apply`."""

    def spread(values: Tensor, absent: int) -> Tensor:
        by_row = torch.full((len(logits),), absent, dtype=values.dtype, device=logits.device)
        return by_row.index_copy_(0, penalties.index, values)

    return RowPenalties(
        slots=spread(penalties.slots, -1),
        repetition=spread(penalties.repetition, 1),
        frequency=spread(penalties.frequency, 0),
        presence=spread(penalties.presence, 0),
        counts=counts,
        in_prompt=in_prompt,
        ahead=ahead,
    )


def _places(rows: Tensor, logits: Tensor) -> Tensor:
    """[S] where each row of the logits stands in `rows`, −1 for nowhere."""
    places = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    return places.index_copy_(0, rows, torch.arange(len(rows), device=logits.device))


def _allowed_masks(allowed: TokenSets, logits: Tensor) -> RowMasks:
    """A mask for each row; rows without allowed tokens are marked as without."""
    masks = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    masks.index_put_((allowed.index, allowed.token_ids), torch.ones_like(allowed.index, dtype=torch.bool))
    index = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    index.index_copy_(0, allowed.index, allowed.index)
    return RowMasks(index=index, masks=masks)
