"""Gated activations of the feed-forward block."""

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import Activation

GatedActivation = Callable[[Tensor], Tensor]
"""[T, 2 * I], gate first, to activation(gate) * up, [T, I]."""


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """SwiGLU's middle."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """GeGLU's middle, GELU by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED: dict[Activation, GatedActivation] = {
    Activation.SILU: silu_and_multiply,
    Activation.GELU_TANH: gelu_tanh_and_multiply,
}
