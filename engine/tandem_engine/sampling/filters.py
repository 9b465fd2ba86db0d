"""Which tokens a row may draw, as one number per row: the smallest scaled logit that stays.

    top-k   the k-th largest logit
    top-p   the last logit of the shortest run, from the largest down, whose probability reaches p;
            probabilities are those after top-k
    min-p   the largest logit + log(min_p)

The row's threshold is the largest of the three. Tokens that tie with it all stay, so no result hangs on
how a sort orders equals, and a row's threshold does not depend on the other rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIRST_RANKED = 256
"""Tokens per row that are sorted at first; most of the probability of a language model is in fewer."""

WIDEN = 8
"""How many times more are sorted when those were too few."""


def keep_thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """The smallest logit that each row keeps.

    Args:
        logits: [R, V] float32, divided by the temperature, largest value of each row 0.
        top_k: [R] int64, 0 for no limit. top_p, min_p: [R] float32.

    Returns:
        [R] float32, −inf for rows without a filter; None when no row has one.
    """
    top_k = top_k.where(top_k < logits.shape[1], 0)
    ranked = (top_k > 0) | (top_p < 1.0)
    if not bool((ranked | (min_p > 0.0)).any()):
        return None
    thresholds = min_p.log()
    rows = ranked.nonzero().squeeze(1)
    if len(rows):
        cut = _rank(logits[rows], top_k[rows], top_p[rows].double())
        thresholds[rows] = thresholds[rows].maximum(cut)
    return thresholds


def queued_thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As `keep_thresholds`, without a look at any value: sorts the whole vocabulary, of rows without a filter too."""
    top_k = top_k.where(top_k < logits.shape[1], 0)
    ranked = (top_k > 0) | (top_p < 1.0)
    cut = _rank_largest(logits.sort(dim=1, descending=True).values, top_k, top_p.double(), _mass(logits)).thresholds
    return min_p.log().maximum(cut.where(ranked, -torch.inf))


def _rank(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Thresholds of top-k and top-p, sorting no more of the vocabulary than they need."""
    vocab_size = logits.shape[1]
    mass = _mass(logits)
    width = max(FIRST_RANKED if bool((top_p < 1.0).any()) else 1, int(top_k.max()) + 1)
    while width < vocab_size:
        ranking = _rank_largest(logits.topk(width, dim=1).values, top_k, top_p, mass)
        if bool(ranking.complete.all()):
            return ranking.thresholds
        width *= WIDEN
    return _rank_largest(logits.sort(dim=1, descending=True).values, top_k, top_p, mass).thresholds


class Ranking(NamedTuple):
    thresholds: Tensor
    complete: Tensor
    """bool [R]: False where the threshold may lie below the tokens that were looked at."""


def _rank_largest(logits: Tensor, top_k: Tensor, top_p: Tensor, mass: Tensor) -> Ranking:
    """Rank by the W largest logits of each row, [R, W] in falling order, where W > top_k or W is everything."""
    limited = top_k > 0
    kth = logits.gather(1, (top_k - 1).clamp(min=0)[:, None]).where(limited[:, None], -torch.inf)
    stays = logits >= kth
    weights = logits.double().exp() * stays
    sums = weights.cumsum(dim=1)
    wanted = top_p * sums[:, -1].where(limited, mass)
    in_run = stays & (sums - weights < wanted[:, None])
    last = (in_run.sum(dim=1) - 1).clamp(min=0)
    by_p = top_p < 1.0
    thresholds = logits.gather(1, last[:, None]).where(by_p[:, None], kth).squeeze(1)
    # Ties with the k-th count towards top-p: all of them must be in sight.
    complete = torch.where(limited, logits[:, -1] < kth.squeeze(1), sums[:, -1] >= wanted)
    return Ranking(thresholds, complete | ~by_p)


def _mass(logits: Tensor) -> Tensor:
    """[R] float64 Σ exp(logits), whose largest term is 1. Not by `sum`, which splits a lone row over threads."""
    return logits.log_softmax(dim=1).amax(dim=1).neg().double().exp()
