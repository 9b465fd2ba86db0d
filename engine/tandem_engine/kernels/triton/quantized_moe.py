"""The products of `fused_moe` by weights of four or eight bits, which are read as they are stored.

    gate, up   inner[p] = round(activation(round(x[t] Gᵀ))) · round(x[t] Uᵀ)
    down       result[p] = inner[p] Dᵀ

Biases are added as `fused_moe` adds them.

Shapes: x [T, H], or [T · k, H] with a row for each pair; inner [T · k, I]; results [T · k, H], float32, bfloat16 or
float16. G and U are the halves of a stack of E matrices [2 · I, H], D is one of [H, I], as `packed_weight` has them.
Sums are those of `quantized_gemm`: exact weights, float32, scales applied to the sums of groups, in one order.

Tiling: a program has OUTPUTS outputs and the pairs of one block, of one expert; weights are the left operand. That of
gate and up goes over the inputs twice, once for each half: x comes from the caches, and only one half at a time needs
registers for its numbers, scales and partial sums. Blocks have 16 pairs while experts have about as many each, for then
a product is bound by how fast weights come from memory and larger tiles would only multiply padding; 64 else. Inputs
are not split: experts are several, so there are programs enough.

A token's result does not depend on its company, if instructions of different width sum alike: see `quantized_gemm`.
Experts whose inputs lie in an order of their own (GPTQ's act-order) get their rows of x in it, by `reorder_kernel`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.interface import PackedWeight
from tandem_engine.kernels.triton.expert_blocks import Alignment
from tandem_engine.kernels.triton.norm_activation import gated_product
from tandem_engine.kernels.triton.quantized_gemm import IN_FLOAT32, Tile, constants_of, sum_of_split

FEW_ROWS, MANY_ROWS = 16, 64

REORDER = 1024
"""Numbers of a program of `reorder_kernel`."""


class Tiles(NamedTuple):
    """Of both products."""

    gate_up: Tile
    down: Tile


FEW = Tiles(
    gate_up=Tile(tokens=FEW_ROWS, outputs=64, num_warps=4, num_stages=4),
    down=Tile(tokens=FEW_ROWS, outputs=64, num_warps=4, num_stages=4),
)

MANY = Tiles(
    gate_up=Tile(tokens=MANY_ROWS, outputs=64, num_warps=8, num_stages=3),
    down=Tile(tokens=MANY_ROWS, outputs=128, num_warps=8, num_stages=3),
)

MANY_OF_SMALL_GROUPS = Tiles(
    gate_up=Tile(tokens=MANY_ROWS, outputs=64, num_warps=8, num_stages=2),
    down=Tile(tokens=MANY_ROWS, outputs=64, num_warps=8, num_stages=2),
)
"""Where a step has inputs of two groups: see `quantized_gemm`."""


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def packed_gate_up_kernel(
    x, codes, scales, zeros, bias, pairs, owner, inner, num_rows, num_pairs, outputs, inputs, row_bytes, group_size,
    groups,
    CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CODING: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """inner[p] of the pairs of block i, outputs [j · OUTPUTS, (j + 1) · OUTPUTS); program (j, i).

    `outputs` are those of gate and up together; x has `num_rows` rows, each of CHOSEN pairs.
    """
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs + block * TOKENS + tl.arange(0, TOKENS))
        half = outputs // 2
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        codes += expert * outputs * row_bytes
        scales += expert * groups * outputs
        zeros += expert * groups * outputs
        # Padding is a pair behind the last, of a row behind the last. Outputs of gate behind its last are those of up:
        # they are computed and not stored.
        gate = sum_of_split(
            x, codes, scales, zeros, output, pair // CHOSEN, 0, inputs, num_rows, outputs, inputs, row_bytes,
            group_size, CODING, GROUPED, ONE_GROUP, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
        up = sum_of_split(
            x, codes, scales, zeros, half + output, pair // CHOSEN, 0, inputs, num_rows, outputs, inputs, row_bytes,
            group_size, CODING, GROUPED, ONE_GROUP, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
        if bias is not None:
            place, live = bias + expert * outputs + output, output < half
            gate += tl.load(place, mask=live, other=0.0).to(tl.float32)[:, None]
            up += tl.load(place + half, mask=live, other=0.0).to(tl.float32)[:, None]
        dtype = inner.dtype.element_ty
        product = gated_product(gate, up, dtype, ACTIVATION, ALPHA, LIMIT)
        target = inner + pair.to(tl.int64)[None, :] * half + output[:, None]
        tl.store(target, product.to(dtype), mask=(output < half)[:, None] & (pair < num_pairs)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def packed_down_kernel(
    inner, codes, scales, zeros, bias, pairs, owner, results, num_pairs, outputs, inputs, row_bytes, group_size, groups,
    CODING: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """results[p] of the pairs of block i, outputs [j · OUTPUTS, (j + 1) · OUTPUTS); program (j, i)."""
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs + block * TOKENS + tl.arange(0, TOKENS))
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        codes += expert * outputs * row_bytes
        scales += expert * groups * outputs
        zeros += expert * groups * outputs
        total = sum_of_split(
            inner, codes, scales, zeros, output, pair, 0, inputs, num_pairs, outputs, inputs, row_bytes,
            group_size, CODING, GROUPED, ONE_GROUP, MIDDLE, TAIL, TOKENS, OUTPUTS, DEPTH,
        )  # fmt: skip
        if bias is not None:
            added = tl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0)
            total += added.to(tl.float32)[:, None]
        target = results + pair.to(tl.int64)[None, :] * outputs + output[:, None]
        live = (output < outputs)[:, None] & (pair < num_pairs)[None, :]
        tl.store(target, total.to(results.dtype.element_ty), mask=live)


@triton.jit
def reorder_kernel(x, experts, order, rows, CHOSEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [i · BLOCK, (i + 1) · BLOCK) of rows[p] = x[t][order of p's expert]; program (p, i)."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    expert = tl.load(experts + pair)
    source = tl.load(order + expert * SIZE + column, mask=live, other=0)
    tl.store(rows + pair * SIZE + column, tl.load(x + pair // CHOSEN * SIZE + source, mask=live), mask=live)


def packed_block_rows(num_pairs: int | None, num_experts: int, dtype: torch.dtype) -> int:
    """Of a block. None for `num_pairs`: the other product is by weights in the dtype, which have one size of tile."""
    if dtype is torch.float32:
        return IN_FLOAT32.tokens
    return FEW_ROWS if num_pairs is not None and num_pairs <= FEW_ROWS * num_experts else MANY_ROWS


def reordered(x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """x [T, H] as [T · k, H]: for each pair of `experts` [T, k], in the order [H] that its expert has of `order`."""
    (num_pairs, chosen), size = (experts.numel(), experts.shape[1]), x.shape[1]
    rows = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    reorder_kernel[(num_pairs, triton.cdiv(size, REORDER))](
        x, experts, order, rows, CHOSEN=chosen, SIZE=size, BLOCK=REORDER
    )
    return rows


def packed_gate_up(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    alignment: Alignment,
    inner: Tensor,
    gate: dict[str, str | float],
) -> None:
    """Fill `inner` [T · k, I] from x, dense, which has a row for each token or for each pair.

    `bias` [E, 2 · I]; `gate`: `product_constants`.
    """
    num_pairs, size = inner.shape
    constants = constants_of(weight)
    tile = tiles_of(alignment.rows, x.dtype, one_group=constants["ONE_GROUP"]).gate_up
    packed_gate_up_kernel[(triton.cdiv(size, tile.outputs), len(alignment.owner))](
        x, *_tensors(weight), bias, alignment.pairs, alignment.owner, inner, len(x), num_pairs, *_numbers(weight),
        CHOSEN=num_pairs // len(x), **gate, **constants, TOKENS=tile.tokens, OUTPUTS=tile.outputs,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def packed_down(
    inner: Tensor, weight: PackedWeight, bias: Tensor | None, alignment: Alignment, results: Tensor
) -> None:
    """Fill `results` [T · k, H] from `inner` [T · k, I], dense. `bias` [E, H]."""
    constants = constants_of(weight)
    tile = tiles_of(alignment.rows, inner.dtype, one_group=constants["ONE_GROUP"]).down
    packed_down_kernel[(triton.cdiv(weight.outputs, tile.outputs), len(alignment.owner))](
        inner, *_tensors(weight), bias, alignment.pairs, alignment.owner, results, len(inner), *_numbers(weight),
        **constants, TOKENS=tile.tokens, OUTPUTS=tile.outputs, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def tiles_of(rows: int, dtype: torch.dtype, *, one_group: bool) -> Tiles:
    """For blocks of so many rows; `one_group`: no step has inputs of two groups."""
    if dtype is torch.float32:
        return Tiles(gate_up=IN_FLOAT32, down=IN_FLOAT32)
    if rows == FEW_ROWS:
        return FEW
    return MANY if one_group else MANY_OF_SMALL_GROUPS


def _tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes, weight.scales, weight.zeros if weight.zeros is not None else weight.codes


def _numbers(weight: PackedWeight) -> tuple[int, int, int, int, int]:
    """Outputs, inputs, bytes of a row, group size, groups."""
    return weight.outputs, weight.inputs, weight.codes.shape[-1], weight.group_size, weight.scales.shape[-2]
