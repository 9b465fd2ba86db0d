"""What a forward says about itself, made equal on all ranks.

Every rank computes the same logits and draws by the same noise, so the tokens are equal unless a kernel is
not deterministic. Should one not be, ranks that went on with different tokens would sooner or later plan
different batches and wait for each other for ever [rank-zero-tokens]: rank 0's count. So does its time: the schedulers
derive rates from it, and plan by them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem_engine.parallel.group import TpGroup


class StepFacts(NamedTuple):
    """Of one step."""

    token_ids: Tensor
    """[S] int64"""
    compute_s: float


def agree_on_step(group: TpGroup, token_ids: Tensor, compute_s: float) -> StepFacts:
    """Rank 0's tokens [S] int64 and seconds. Forward thread only, once in every step of every rank."""
    if group.size == 1:
        return StepFacts(token_ids, compute_s)
    nanoseconds = torch.tensor([int(compute_s * 1e9)], dtype=torch.int64, device=token_ids.device)
    facts = group.broadcast(torch.cat((token_ids, nanoseconds)))
    return StepFacts(facts[:-1], int(facts[-1]) / 1e9)
