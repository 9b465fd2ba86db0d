"""Affine projections, in the layout that the device multiplies fastest.

Checkpoints store [out, in]. On a GPU that is what GEMMs want. On an x86 CPU oneDNN has a blocked layout of
its own, and reordering into it once, at load, makes a projection of up to 32 tokens about twice as fast as
`F.linear` in float32 and bfloat16 alike, and one of 512 no slower. A decode step is mostly such projections.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Projection = Callable[[Tensor], Tensor]
"""[T, in] to [T, out]."""

TYPICAL_TOKENS = 32
"""Batch that the blocked layout is chosen for. 32 and 256 choose the same; 1 chooses one that only suits 1."""

MIN_PACKED_ELEMENTS = 1 << 16
"""Below, the ten microseconds that a packed call costs beyond `F.linear` outweigh what it saves."""


def projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """x Wᵀ + b for W [out, in] and b [out]. May keep a reordered copy of W instead of W."""
    if _packing_pays(weight):
        return PackedLinear.pack(weight, bias)
    return Linear(weight=weight, bias=bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """The weight as stored."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """The weight in oneDNN's blocked layout, multiplied by the operator `torch.compile` uses for frozen weights."""

    packed: Tensor
    bias: Tensor | None

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> "PackedLinear":
        return cls(packed=torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS), bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def _packing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < MIN_PACKED_ELEMENTS:
        return False
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
