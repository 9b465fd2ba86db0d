"""Layers on a device, each a kernel or two. Importing this module requires Triton.

The CPU versions document what a layer computes and where it rounds: `norm`, `mlp`. Experts are in `triton_experts`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from tandem_engine.config import Activation
from tandem_engine.kernels.interface import (
    INT4,
    INT8,
    PACKED_E2M1,
    PACKED_FLOAT8,
    GatedActivation,
    PackedWeight,
)
from tandem_engine.kernels.triton.norm_activation import add_rms_norm, gated_activation, rms_norm
from tandem_engine.kernels.triton.quantized_gemm import FEW, quantized_linear
from tandem_engine.model.quantization.levels import Levels


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRmsNorm:
    """Implements `Norm`: `RmsNorm`, or `LateRoundingRmsNorm` where the weight is float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, self.weight, eps=self.eps)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """See `Norm.of_sum`."""
        return add_rms_norm(hidden, delta, self.weight, eps=self.eps)


def device_activation(activation: Activation) -> GatedActivation:
    """The kernel of `activation`."""
    return partial(gated_activation, activation=activation.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceQuantizedLinear:
    """Implements `Projection` by a weight that stays quantized."""

    weight: PackedWeight
    bias: Tensor | None
    order: Tensor | None
    """int64 [in]: the inputs in the order of their groups, where a checkpoint has them otherwise (GPTQ's act-order)."""

    @classmethod
    def of(cls, levels: Levels, bias: Tensor | None, dtype: torch.dtype) -> Self:
        """For a matrix that `linear.can_multiply` has accepted, and inputs of `dtype`. Kernels are compiled."""
        levels, order = in_order(levels)
        layer = cls(weight=packed_weight(levels).lean(), bias=bias, order=order)
        layer._warm_up(dtype)
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        return quantized_linear(x if self.order is None else x.index_select(1, self.order), self.weight, self.bias)

    def _warm_up(self, dtype: torch.dtype) -> None:
        """No request waits for a compiler: run whatever any number of tokens takes."""
        counts = [1, *(tile.tokens + 1 for tile in FEW)]
        x = torch.zeros((max(counts), self.weight.inputs), dtype=dtype, device=self.weight.codes.device)
        for tokens in counts:
            self(x[:tokens])


def in_order(levels: Levels) -> tuple[Levels, Tensor | None]:
    """A matrix that `linear.can_multiply` has accepted with its inputs in the order of their groups.

    Behind it int64 [inputs], which input is where; None if they were in order.
    """
    if levels.groups is None:
        return levels, None
    ordered = levels.sorted()
    assert ordered is not None, "groups of unequal size"
    return ordered


def packed_weight(levels: Levels) -> PackedWeight:
    """A matrix whose inputs are in order, as kernels read it."""
    if levels.zeros is None:
        coding = PACKED_FLOAT8 if levels.is_float8 else PACKED_E2M1
    else:
        coding = INT8 if levels.bits == 8 else INT4
    return PackedWeight.pack(
        levels.codes.view(torch.uint8), levels.scales, levels.zeros, coding=coding, group_size=levels.group_size
    )
