"""A projection by int8 weights on a CPU.

    out = (x Qᵀ) · s + b          Q int8 [out, in], s float32 [out]

Products are of exact numbers, sums are float32, and the result is rounded once; a token's is the same in any batch.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tandem_engine.kernels.cpu.panels import Panels, multiply, pack_int8
from tandem_engine.model.quantization.levels import INT8_MIDDLE, Levels


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Linear:
    """Implements `Projection`."""

    panels: Panels
    scales: Tensor
    """float32 [out]"""
    bias: Tensor | None
    """float32 [out]"""

    @classmethod
    def of(cls, levels: Levels, bias: Tensor | None, dtype: torch.dtype) -> Self:
        """For a matrix that `linear.can_multiply` has accepted, and inputs of `dtype`."""
        codes = (levels.codes.int() - INT8_MIDDLE).to(torch.int8)
        return cls(
            panels=pack_int8(codes, dtype),
            scales=levels.scales[:, 0].float().contiguous(),
            bias=None if bias is None else bias.float(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.panels, self.bias, scales=self.scales)
