"""Gated activations of the feed-forward block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import Activation
from tandem_engine.kernels.dispatch import by_triton

GatedActivation = Callable[[Tensor], Tensor]
"""[T, 2 * I], gate first, to activation(gate) * up, [T, I]."""


def gated(activation: Activation, device: torch.device) -> GatedActivation:
    """The activation of a block whose weights are on `device`."""
    if by_triton(device):
        from tandem_engine.model.layers.on_device import device_activation

        return device_activation(activation)
    return GATED[activation]


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
