"""Affine projections, in the layout that the device multiplies fastest.

Checkpoints store [out, in]. On a GPU that is what GEMMs want. On an x86 CPU oneDNN has a blocked layout of its own,
into which a weight is reordered once, at load. Many tokens are multiplied by oneDNN, few by kernels of our own that
read the same memory (`model.fused.projection`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

if TYPE_CHECKING:
    from tandem_engine.model.fused.projection import PanelLinear

Projection = Callable[[Tensor], Tensor]
"""[T, in] to [T, out]."""

TYPICAL_TOKENS = 32
"""Batch that the blocked layout is chosen for. 32 and 256 choose the same; 1 chooses one that only suits 1."""

FEW_TOKENS = 32
"""So many at most take our own kernel, which is 10 to 15 % slower from 8 on; with more, oneDNN's lead would grow."""

NEAR_TOKENS, NEAR, FAR = 128, 4, 32
"""oneDNN compiles its product anew for each number of rows, which takes as long as the product itself. So it is given
multiples of `NEAR` up to `NEAR_TOKENS`, which batches of decodes have, and of `FAR` beyond."""

MIN_PACKED_ELEMENTS = 1 << 16
"""Below, the ten microseconds that a packed call costs beyond `F.linear` outweigh what it saves."""


def padded_tokens(tokens: int) -> int:
    """As how many tokens a number of them is multiplied: what is behind them costs little and means nothing."""
    if tokens <= FEW_TOKENS:
        return tokens
    multiple = NEAR if tokens <= NEAR_TOKENS else FAR
    return -(-tokens // multiple) * multiple


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
    few: "PanelLinear | None"
    """The same for `FEW_TOKENS` at most, out of the same memory, where its layout is one that our kernels read."""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> "PackedLinear":
        # Only an engine on a CPU needs numba.
        from tandem_engine.model.fused.projection import panel_linear

        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
        return cls(packed=packed, bias=bias, few=panel_linear(packed, weight, bias))

    def __call__(self, x: Tensor) -> Tensor:
        tokens = len(x)
        if self.few is not None and tokens <= FEW_TOKENS:
            return self.few(x)
        padded = padded_tokens(tokens)
        if padded != tokens:
            x = F.pad(x, (0, 0, 0, padded - tokens))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out if padded == tokens else out[:tokens]


def _packing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.numel() < MIN_PACKED_ELEMENTS:
        return False
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
