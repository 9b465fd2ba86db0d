"""The middle of a gated feed-forward block: activation(gate) · up.

    silu         x / (1 + e^−x)                                         SwiGLU
    gelu_tanh    ½ x (1 + tanh y) = x / (1 + e^−2y),  y = √(2/π) (x + 0.044715 x³)       GeGLU

Shapes: gate_up [T, 2 · I] with the gate first, to [T, I] of the same dtype. Computed in float32; the activated gate
is rounded to the dtype before it is multiplied, as in `model.layers.activation`. In bfloat16 the result is at most 2
units of its last place from torch's, of 2^-6 where it is smaller; in float32 at most 3e-5 of its size from float64's,
far below zero, where the error of y counts in e^−2y.

Tiling: program (t, i) has BLOCK numbers of token t. 3 numbers move for each of the result, torch's two operations
move 5.

Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.rounding import rounded

BLOCK = 1024
"""Numbers of a program."""
ACTIVATIONS = ("silu", "gelu_tanh")
"""By their names in `config.Activation`."""

_TWICE_ROOT = tl.constexpr(2 * 0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """activation(gate), float32."""
    exponent = gate if ACTIVATION == "silu" else _TWICE_ROOT * (gate + _CUBIC * gate * gate * gate)
    return gate / (1.0 + tl.exp(-exponent))


@triton.jit
def gated_activation_kernel(
    gate_up,
    out,
    token_stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, i] = activation(gate_up[t, i]) · gate_up[t, SIZE + i]"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + token * token_stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * token_stride + SIZE + column, mask=live, other=0.0).to(tl.float32)
    product = rounded(activated(gate, ACTIVATION), dtype) * up
    tl.store(out + token * SIZE + column, product.to(dtype), mask=live)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2 · I], rows dense, to a dense [T, I]. `activation` is one of `ACTIVATIONS`."""
    tokens, both = gate_up.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        assert gate_up.stride(1) == 1, f"gate_up of strides {gate_up.stride()}"
        constants = gated_activation_constants(both // 2, activation)
        grid = (tokens, triton.cdiv(both // 2, BLOCK))
        gated_activation_kernel[grid](gate_up, out, gate_up.stride(0), **constants)
    return out


def gated_activation_constants(size: int, activation: str) -> dict[str, int | str]:
    """What the kernel is compiled for."""
    assert activation in ACTIVATIONS, f"activation {activation!r} is none of {ACTIVATIONS}"
    return {"SIZE": size, "ACTIVATION": activation, "BLOCK": BLOCK}
