"""Kernels around a feed-forward block: RMS norm, optionally after a residual addition; activation(gate) · up.

    norm        out    = x / sqrt(mean(x²) + eps) · w
    added       hidden = hidden + delta                    in place, rounded to the dtype of `hidden`
                out    = hidden / sqrt(mean(hidden²) + eps) · w
    silu        x / (1 + e^−x)                                                           SwiGLU
    gelu_tanh    ½ x (1 + tanh y) = x / (1 + e^−2y),  y = √(2/π) (x + 0.044715 x³)       GeGLU

Shapes: x [T, D] with w [D], or heads x [T, H, D] with w [H, D], whose tokens may be further apart than H · D, as the
heads of q and k are in the output of their projection; gate_up [T, 2 · I], gate first, to [T, I] of the same dtype. Any
float dtype; computed in float32.

Rounding is that of `model.layers`: with w in x's dtype x / rms is rounded, multiplied by w and rounded again; with w in
float32 (Gemma's 1 + w) x / rms · w is rounded once; the activated gate is rounded before the product. The sum of
squares has another order than torch's, so x / rms may differ by a few units of float32's last place, in bfloat16 by at
most one unit of its last place before w is applied. Activations in bfloat16 are at most 2 units of the last place from
torch's, of 2^-6 where the result is smaller; in float32 at most 3e-5 of the size from float64's, far below zero, where
the error of y counts in e^−2y.

Tiling: a program of the norm has ROWS whole rows of D numbers as one tile. ROWS follows from D alone, so the order of a
row's sum does not depend on the number of rows. Program (t, i) of the activation has BLOCK numbers of token t. The
residual addition moves 4 numbers per number of the stream, where three operations of torch move 7; the activation 3
per result, where two operations move 5.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; the fused residual as in Apex and vLLM; Shazeer,
GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.triton.common import rounded

TILE = 4096
"""Numbers of a program, where rows are shorter than that."""


@triton.jit
def normalized(x, squares, weight, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """x / sqrt(squares / SIZE + eps) · weight in float32; with ROUND_FIRST rounded to DTYPE before the weight."""
    x = x * tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.math.div_rn(squares, SIZE * 1.0) + eps))
    if ROUND_FIRST:
        x = rounded(x, DTYPE)
    return x * weight


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    num_rows,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Rows [i · ROWS, (i + 1) · ROWS) of T · HEADS, row r being head r % HEADS of token r // HEADS; program i."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    live = (row < num_rows) & (column < SIZE)
    token, head = row // HEADS, row % HEADS
    source = x + token.to(tl.int64) * token_stride + head * SIZE + column
    dense = row.to(tl.int64) * SIZE + column
    dtype = x.dtype.element_ty
    values = tl.load(source, mask=live, other=0.0).to(tl.float32)
    if ADD:
        values = rounded(values + tl.load(delta + dense, mask=live, other=0.0).to(tl.float32), dtype)
        tl.store(source, values.to(dtype), mask=live)
    squares = tl.sum(values * values, axis=1)[:, None]
    scale = tl.load(weight + head * SIZE + column, mask=live, other=0.0).to(tl.float32)
    normed = normalized(values, squares, scale, eps, SIZE, dtype, ROUND_FIRST)
    tl.store(out + dense, normed.to(dtype), mask=live)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalize the last dimension of x to a dense tensor of its shape and dtype.

    Args:
        x: [T, D] or [T, H, D], dense but for the first dimension.
        weight: [D] or [H, D], dense; float32 when it is to be applied before rounding.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add `delta` to `hidden` in place and normalize the sum. All [T, D] and dense, `weight` [D]."""
    assert delta.is_contiguous(), f"delta of strides {delta.stride()}"
    out = torch.empty_like(hidden)
    _launch(hidden, delta, weight, out, eps)
    return out


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    if not x.numel():
        return
    assert weight.is_contiguous(), f"weight of strides {weight.stride()}"
    assert x.shape[1:] == weight.shape, f"x of shape {tuple(x.shape)}, weight of {tuple(weight.shape)}"
    heads, size = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
    assert x.stride()[1:] in ((1,), (size, 1)), f"x of strides {x.stride()}"
    constants = rms_norm_constants(heads, size, add=delta is not None, round_first=weight.dtype == x.dtype)
    num_rows = x.shape[0] * heads
    grid = (triton.cdiv(num_rows, constants["ROWS"]),)
    rms_norm_kernel[grid](
        x, x if delta is None else delta, weight, out, num_rows, x.stride(0), eps,
        **constants, num_warps=warps_of(constants["WIDTH"]),
    )  # fmt: skip


def rms_norm_constants(heads: int, size: int, *, add: bool, round_first: bool) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    width = triton.next_power_of_2(size)
    return {
        "HEADS": heads,
        "SIZE": size,
        "WIDTH": width,
        "ROWS": max(1, TILE // width),
        "ADD": add,
        "ROUND_FIRST": round_first,
    }


def warps_of(width: int) -> int:
    """Of a program with rows of `width`: enough that a thread has at most 32 numbers."""
    return max(4, min(16, width // 1024))


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


CLAMPED_SWIGLU = "clamped_swiglu"
"""Of experts alone: see `gated_product`."""


class Clamp(NamedTuple):
    """Numbers of `CLAMPED_SWIGLU`."""

    alpha: float
    limit: float


def product_constants(activation: str, clamp: Clamp | None) -> dict[str, str | float]:
    """What `gated_product` is compiled for."""
    known = activation in ACTIVATIONS if clamp is None else activation == CLAMPED_SWIGLU
    assert known, f"activation {activation!r} with {clamp}"
    alpha, limit = clamp or (1.0, 0.0)
    return {"ACTIVATION": activation, "ALPHA": alpha, "LIMIT": limit}


@triton.jit
def gated_product(
    gate, up, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """round(activation(gate)) · up of rounded gate and up, float32.

    clamped_swiglu: round(g / (1 + e^(−ALPHA g))) · round(u + 1), where g ≤ LIMIT and −LIMIT ≤ u ≤ LIMIT.
    """
    gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = rounded(tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0, DTYPE)
        return rounded(gate / (1.0 + tl.exp(-ALPHA * gate)), DTYPE) * up
    return rounded(activated(gate, ACTIVATION), DTYPE) * up


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
