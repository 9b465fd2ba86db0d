"""Gated activation of the feed-forward block."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """SwiGLU's middle: [T, 2 * I], gate first, to silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
