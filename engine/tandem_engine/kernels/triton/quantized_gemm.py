"""x Wᵀ + b for a W of four or eight bits, which is read as stored and never written in a larger type.

    out[t, n] = round( b[n] + Σ over splits, in order, of
                              Σ over groups g of the split of  scale[g, n] · Σ over k of g  q[n, k] · x[t, k] )

Shapes: x [T, K] and out [T, N], float32, bfloat16 or float16; W as `packed_weight` has it; b [N] or None.

Exactness: q, code − zero or an e4m3 or e2m1 number, is exact in each of these types, since integers up to 255 in size
have eight bits, e4m3 has four and e2m1 two. So the products are of exact weights; sums are float32 (float32 x: IEEE
arithmetic, no tensor cores). Scales apply to sums, which is less work than to weights and rounds nothing in between. No
instruction converts integers: a code in the mantissa of 2^23 is the float32 number 2^23 + code, and one subtraction
leaves code − zero. e4m3 and e2m1 become a float16 with their exponent moved.

Tiling: a program has OUTPUTS outputs and TOKENS tokens and walks over the inputs, `step` at a time. W is the left
operand, the one that tensor cores take from registers; x is small and comes from the caches. Few tokens (a decode) are
bound by memory, which takes more programs than there are tiles of outputs. So the inputs are split: each split's sums
are written in float32, and a second kernel adds them in order. Many tokens are bound by tensor cores: one program goes
over all splits, and adds them in the same order. No atomics.

The number and borders of splits follow from N and K alone, and the order of every sum is the same for few tokens and
many: a token's result does not depend on its batch. Tiles of 16 and 64 tokens use instructions of different width; that
these sum in the same order is tested on devices (tests/gpu).

Source: scaling sums by group as DeepSeek-V3's GEMM (arXiv 2412.19437, 3.3.2); numbers in the mantissa of a power of two
as FasterTransformer (arXiv 2211.10017, 3) and Marlin (arXiv 2408.11743).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.interface import MIDDLES, PackedWeight


@triton.jit
def from_integer(codes, zeros):
    """code − zero, exact in float32, for codes below 2^23; int32 [N, K], float32 [N]."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)[:, None]


@triton.jit
def from_upper_half(bytes_, zeros):
    """(byte >> 4) − zero; the four bits stay where they are, which makes a number of sixteenths."""
    sixteenths = ((bytes_ & 0xF0) | 0x4B000000).to(tl.float32, bitcast=True)
    return sixteenths * 0.0625 - (zeros + 524288.0)[:, None]


@triton.jit
def from_float8(codes):
    """e4m3 to float32, exact: its bits are those of a float16 2^8 times as small, subnormal ones included."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def from_e2m1(codes):
    """e2m1 in the lowest four bits to float32, exact: its bits are those of a float16 2^14 times as small."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def zeros_of(zeros, group, output, live, outputs, MIDDLE: tl.constexpr, N: tl.constexpr):
    """float32 [N] zero points of a group."""
    if MIDDLE >= 0:
        return tl.full((N,), MIDDLE, tl.float32)
    return tl.load(zeros + group * outputs + output, mask=live, other=0).to(tl.float32)


@triton.jit
def scales_of(scales, group, output, live, outputs):
    """float32 [N, 1] scales of a group."""
    return tl.load(scales + group * outputs + output, mask=live, other=0.0).to(tl.float32)[:, None]


PROGRAMS = 256
"""That splits shall make of a decode, about two for each multiprocessor of an H200."""

MIN_SPLIT = 512
"""Inputs of a split, at least: its sums have to be worth writing."""

MAX_SPLITS = 8

COMBINE = 1024
"""Numbers of a program of `combine_kernel`."""


class Tile(NamedTuple):
    """How a product is cut."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int


FEW = (
    Tile(tokens=16, outputs=64, num_warps=4, num_stages=4),
    Tile(tokens=64, outputs=64, num_warps=4, num_stages=4),
)
"""For as many tokens at most; inputs are split."""

MANY = Tile(tokens=64, outputs=128, num_warps=8, num_stages=3)

MANY_OF_SMALL_GROUPS = Tile(tokens=64, outputs=64, num_warps=8, num_stages=2)
"""Where a step has inputs of two groups: more has to be kept in registers. Of a third stage Triton 3.6 spills some."""

IN_FLOAT32 = Tile(tokens=16, outputs=32, num_warps=4, num_stages=3)
"""For any number of tokens. Without tensor cores sums and both operands share the registers."""


@triton.jit
def sum_of_pairs(
    rows, columns, scales, zeros, output, live, live_token, first, stop, outputs, group_size,
    FLOAT: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """`sum_of_split` for numbers of four bits; scaled if `GROUPED`."""
    dtype = columns.dtype.element_ty
    k = tl.arange(0, DEPTH)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for start in range(first, stop, 2 * DEPTH):
        pairs = tl.load(rows + (start // 2 + k)[None, :], mask=live[:, None], other=0).to(tl.int32)
        lower_x = tl.load(columns + (start + k)[:, None], mask=live_token[None, :], other=0.0)
        upper_x = tl.load(columns + (start + DEPTH + k)[:, None], mask=live_token[None, :], other=0.0)
        group = start // group_size
        zero = zeros_of(zeros, group, output, live, outputs, MIDDLE, OUTPUTS)
        lower = (from_e2m1(pairs) if FLOAT else from_integer(pairs & 15, zero)).to(dtype)
        if ONE_GROUP:
            upper = (from_e2m1(pairs >> 4) if FLOAT else from_upper_half(pairs, zero)).to(dtype)
            if GROUPED:
                part = tl.dot(lower, lower_x, input_precision="ieee")
                part = tl.dot(upper, upper_x, part, input_precision="ieee")
                total += part * scales_of(scales, group, output, live, outputs)
            else:
                total = tl.dot(lower, lower_x, total, input_precision="ieee")
                total = tl.dot(upper, upper_x, total, input_precision="ieee")
        else:
            part = tl.dot(lower, lower_x, input_precision="ieee")
            total += part * scales_of(scales, group, output, live, outputs)
            group = (start + DEPTH) // group_size
            zero = zeros_of(zeros, group, output, live, outputs, MIDDLE, OUTPUTS)
            upper = (from_e2m1(pairs >> 4) if FLOAT else from_upper_half(pairs, zero)).to(dtype)
            part = tl.dot(upper, upper_x, input_precision="ieee")
            total += part * scales_of(scales, group, output, live, outputs)
    return total


@triton.jit
def sum_of_bytes(
    rows, columns, scales, zeros, output, live, live_token, first, stop, outputs, inputs, group_size,
    FLOAT: tl.constexpr,
    GROUPED: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """`sum_of_split` for numbers of eight bits; scaled if `GROUPED`."""
    dtype = columns.dtype.element_ty
    k = tl.arange(0, DEPTH)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for start in range(first, stop, DEPTH):
        read, read_x = live[:, None], live_token[None, :]
        if TAIL:
            live_k = start + k < inputs
            read = read & live_k[None, :]
            read_x = read_x & live_k[:, None]
        stored = tl.load(rows + (start + k)[None, :], mask=read, other=0).to(tl.int32)
        values = tl.load(columns + (start + k)[:, None], mask=read_x, other=0.0)
        group = start // group_size
        if FLOAT:
            weight = from_float8(stored).to(dtype)
        else:
            zero = zeros_of(zeros, group, output, live, outputs, MIDDLE, OUTPUTS)
            weight = from_integer(stored, zero).to(dtype)
        if GROUPED:
            part = tl.dot(weight, values, input_precision="ieee")
            total += part * scales_of(scales, group, output, live, outputs)
        else:
            total = tl.dot(weight, values, total, input_precision="ieee")
    return total


@triton.jit
def sum_of_split(
    x, codes, scales, zeros, output, token, first, stop, num_tokens, outputs, inputs, row_bytes, group_size,
    CODING: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Σ over inputs [first, stop) of W[n, k] · x[t, k], float32 [OUTPUTS, TOKENS]."""
    live, live_token = output < outputs, token < num_tokens
    rows = codes + output.to(tl.int64)[:, None] * row_bytes
    columns = x + token.to(tl.int64)[None, :] * inputs
    if CODING == "int4" or CODING == "e2m1":  # noqa: PLR1714 - a kernel has no sets
        total = sum_of_pairs(
            rows, columns, scales, zeros, output, live, live_token, first, stop, outputs, group_size,
            CODING == "e2m1", GROUPED, ONE_GROUP, MIDDLE, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
    else:
        total = sum_of_bytes(
            rows, columns, scales, zeros, output, live, live_token, first, stop, outputs, inputs, group_size,
            CODING == "float8", GROUPED, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
    return total if GROUPED else total * scales_of(scales, 0, output, live, outputs)


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def split_kernel(
    x, codes, scales, zeros, partials, num_tokens, outputs, inputs, row_bytes, group_size, steps,
    CODING: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """partials[s, t, n] of tile j of outputs and tile i of tokens; program (j, s, i). A split is so many `steps`."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    # A multiple of a constant: the compiler sees how loads are aligned.
    split = steps * (2 * DEPTH if CODING == "int4" or CODING == "e2m1" else DEPTH)  # noqa: PLR1714
    first = tl.program_id(1) * split
    total = sum_of_split(
        x, codes, scales, zeros, output, token, first, min(first + split, inputs), num_tokens, outputs, inputs,
        row_bytes, group_size, CODING, GROUPED, ONE_GROUP, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
    )  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * num_tokens + token
    place = partials + row[None, :] * outputs + output[:, None]
    tl.store(place, total, mask=(output < outputs)[:, None] & (token < num_tokens)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def whole_kernel(
    x, codes, scales, zeros, bias, out, num_tokens, outputs, inputs, row_bytes, group_size, steps,
    BIAS: tl.constexpr,
    CODING: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out[t, n] of tile j of outputs and tile i of tokens; program (j, i)."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = steps * (2 * DEPTH if CODING == "int4" or CODING == "e2m1" else DEPTH)  # noqa: PLR1714
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for first in range(0, inputs, split):
        total += sum_of_split(
            x, codes, scales, zeros, output, token, first, min(first + split, inputs), num_tokens, outputs, inputs,
            row_bytes, group_size, CODING, GROUPED, ONE_GROUP, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
    live = output < outputs
    if BIAS:
        total += tl.load(bias + output, mask=live, other=0.0).to(tl.float32)[:, None]
    place = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=live[:, None] & (token < num_tokens)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def combine_kernel(partials, bias, out, num_tokens, splits, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [i · BLOCK, (i + 1) · BLOCK) of out[t]; program (t, i)."""
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(partials + (split * num_tokens + token) * outputs + output, mask=live, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * outputs + output, total.to(out.dtype.element_ty), mask=live)


def quantized_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, [T, N] of x's dtype. x [T, K] may have any strides; b [N] is dense, of any float type."""
    num_tokens, outputs = len(x), weight.outputs
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    x = x.contiguous()
    split = split_of(outputs, weight.inputs, weight.step)
    splits = triton.cdiv(weight.inputs, split)
    constants = constants_of(weight)
    tensors = (x, weight.codes, weight.scales, weight.zeros if weight.zeros is not None else weight.codes)
    numbers = (num_tokens, outputs, weight.inputs, weight.codes.shape[1], weight.group_size, split // weight.step)
    given = bias if bias is not None else x
    tile = tile_of(num_tokens, x.dtype, one_group=constants["ONE_GROUP"])
    tiles = triton.cdiv(outputs, tile.outputs), triton.cdiv(num_tokens, tile.tokens)
    if num_tokens > FEW[-1].tokens or splits == 1:
        whole_kernel[tiles](
            *tensors, given, out, *numbers, BIAS=bias is not None, **constants, TOKENS=tile.tokens,
            OUTPUTS=tile.outputs, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out
    partials = torch.empty((splits, num_tokens, outputs), dtype=torch.float32, device=x.device)
    split_kernel[tiles[0], splits, tiles[1]](
        *tensors, partials, *numbers, **constants, TOKENS=tile.tokens, OUTPUTS=tile.outputs,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    combine_kernel[(num_tokens, triton.cdiv(outputs, COMBINE))](
        partials, given, out, num_tokens, splits, outputs, BIAS=bias is not None, BLOCK=COMBINE
    )
    return out


def tile_of(num_tokens: int, dtype: torch.dtype, *, one_group: bool) -> Tile:
    """For a product of so many tokens; `one_group`: no step has inputs of two groups."""
    if dtype is torch.float32:
        return IN_FLOAT32
    many = MANY if one_group else MANY_OF_SMALL_GROUPS
    return next((tile for tile in FEW if num_tokens <= tile.tokens), many)


def split_of(outputs: int, inputs: int, step: int) -> int:
    """Inputs of a split: a multiple of `step`, decided by the shape of the matrix alone."""
    tiles = triton.cdiv(outputs, FEW[0].outputs)
    splits = max(1, min(PROGRAMS // tiles, inputs // MIN_SPLIT, MAX_SPLITS))
    return int(triton.cdiv(triton.cdiv(inputs, splits), step) * step)


def constants_of(weight: PackedWeight) -> dict[str, Any]:
    """What the kernels are compiled for, besides tiles."""
    return {
        "CODING": weight.coding,
        "GROUPED": weight.group_size < weight.inputs,
        "ONE_GROUP": weight.group_size >= weight.inputs or weight.group_size % weight.step == 0,
        "MIDDLE": MIDDLES[weight.coding] if weight.zeros is None else -1,
        "TAIL": bool(weight.inputs % weight.depth),
        "DEPTH": weight.depth,
    }
