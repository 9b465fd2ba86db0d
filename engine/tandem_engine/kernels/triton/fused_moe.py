"""Experts of a sparse feed-forward block, all at once; the host does not know which tokens selected which experts.

    align      pairs p = t · k + rank of tokens and experts in blocks of one expert each (`expert_blocks`)
    gate, up   inner[p] = round(activation(round(x[t] Gᵀ))) · round(x[t] Uᵀ), the halves G and U of the expert's weight
    down       result[p] = inner[p] Dᵀ                            biases of experts are added before a sum is rounded
    combine    out[t]: a token's results, weighted and added

Shapes: x [T, H]; experts [T, k] int64, weights [T, k]; gate_up [E, 2 · I, H], gate first, down [E, H, I]; out [T, H].
x and weights have one dtype, and every `round` is to it: those are the places where `model.layers.mlp` rounds. Each of
the two products is by weights of that dtype (here) or by packed ones (`quantized_moe`). Products are summed in float32
(float32 inputs in IEEE arithmetic), in another order than torch's.

Tiling: a program of a product has the rows of one block and a tile of the outputs, gathers its rows by `pairs`, and
walks over the inputs BLOCK_K at a time; the one of gate and up sums both and never writes them.

Tiles follow from the number of pairs (`expert_tiles`), and the order of a row's sum follows from no tile: so a token's
result does not depend on T.

Source: the grouped product as in Triton's grouped GEMM tutorial.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.interface import PackedWeight
from tandem_engine.kernels.triton.common import facts_of
from tandem_engine.kernels.triton.expert_blocks import Alignment, align, combine
from tandem_engine.kernels.triton.expert_tiles import SOME, ExpertTiles, GemmTile, expert_tiles
from tandem_engine.kernels.triton.norm_activation import Clamp, gated_product, product_constants
from tandem_engine.kernels.triton.quantized_moe import packed_block_rows, packed_down, packed_gate_up, reordered

ExpertWeights = Tensor | PackedWeight
"""[E, outputs, inputs]: in the dtype of x, dense, or a packed stack."""


class ExpertBiases(NamedTuple):
    """Of any float type, dense."""

    gate_up: Tensor
    """[E, 2 · I], gate first"""
    down: Tensor | None
    """[E, H]; None where another rank adds it."""


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,
    weight,
    pairs,
    owner,
    bias,
    inner,
    num_pairs,
    CHOSEN: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner[p] of the pairs of block i, outputs [j · OUTPUTS, (j + 1) · OUTPUTS); program (j, i)."""
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live_row = pair < num_pairs
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        live_output = output < INNER
        gate_weight = weight + expert * (2 * INNER * DEPTH)
        up_weight = gate_weight + INNER * DEPTH
        row = pair // CHOSEN
        gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
        up = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, DEPTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            live_k = k < DEPTH
            left = tl.load(x + row[:, None] * DEPTH + k[None, :], mask=live_row[:, None] & live_k[None, :], other=0.0)
            place = output[None, :] * DEPTH + k[:, None]
            live = live_output[None, :] & live_k[:, None]
            gate = tl.dot(left, tl.load(gate_weight + place, mask=live, other=0.0), gate, input_precision="ieee")
            up = tl.dot(left, tl.load(up_weight + place, mask=live, other=0.0), up, input_precision="ieee")
        if bias is not None:
            place = bias + expert * (2 * INNER) + output
            gate += tl.load(place, mask=live_output, other=0.0).to(tl.float32)[None, :]
            up += tl.load(place + INNER, mask=live_output, other=0.0).to(tl.float32)[None, :]
        dtype = inner.dtype.element_ty
        product = gated_product(gate, up, dtype, ACTIVATION, ALPHA, LIMIT)
        target = inner + pair[:, None] * INNER + output[None, :]
        tl.store(target, product.to(dtype), mask=live_row[:, None] & live_output[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    inner,
    weight,
    pairs,
    owner,
    bias,
    results,
    num_pairs,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """results[p] of the pairs of block i, outputs [j · OUTPUTS, (j + 1) · OUTPUTS); program (j, i)."""
    block = tl.program_id(1)
    expert = tl.load(owner + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live_row = pair < num_pairs
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        live_output = output < SIZE
        weight += expert * (SIZE * DEPTH)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, DEPTH, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            live_k = k < DEPTH
            left = tl.load(
                inner + pair[:, None] * DEPTH + k[None, :], mask=live_row[:, None] & live_k[None, :], other=0.0
            )
            place = output[None, :] * DEPTH + k[:, None]
            right = tl.load(weight + place, mask=live_output[None, :] & live_k[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + expert * SIZE + output, mask=live_output, other=0.0).to(tl.float32)[None, :]
        target = results + pair[:, None] * SIZE + output[None, :]
        tl.store(target, total.to(results.dtype.element_ty), mask=live_row[:, None] & live_output[None, :])


def fused_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: str,
    clamp: Clamp | None = None,
    biases: ExpertBiases | None = None,
    order: Tensor | None = None,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """What the chosen experts make of x, weighted and added: [T, H], dense. All arguments are dense.

    Args:
        clamp: of `CLAMPED_SWIGLU`, and of no other activation.
        order: int32 [E, H], where `gate_up` has the inputs of each expert in a separate order.
        tiles: where no weight is packed, these in place of those for so many pairs.
    """
    gate = product_constants(activation, clamp)
    of_gate_up, of_down = biases or (None, None)
    tokens, size = x.shape
    num_pairs, num_experts = experts.numel(), num_experts_of(gate_up)
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    tiles = tiles or _tiles_of(num_pairs, gate_up, down, x)
    alignment = align(experts, num_experts, tiles.rows)
    rows = x if order is None else reordered(x, experts, order)
    inner = torch.empty((num_pairs, inputs_of(down)), dtype=x.dtype, device=x.device)
    results = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    _multiply_gate_up(rows, gate_up, of_gate_up, alignment, inner, gate, tiles.gate_up)
    _multiply_down(inner, down, of_down, alignment, results, tiles.down)
    combine(results, weights, out)
    return out


def _tiles_of(num_pairs: int, gate_up: ExpertWeights, down: ExpertWeights, x: Tensor) -> ExpertTiles:
    """Rows of a block of so many pairs, and tiles of plain weights."""
    packed, num_experts = [isinstance(weight, PackedWeight) for weight in (gate_up, down)], num_experts_of(gate_up)
    if not any(packed):
        return expert_tiles(num_pairs, num_experts, x.dtype, shared_bytes=facts_of(x.device).shared_bytes)
    return SOME._replace(rows=packed_block_rows(num_pairs if all(packed) else None, num_experts, x.dtype))


def num_experts_of(weight: ExpertWeights) -> int:
    return len(weight.codes) if isinstance(weight, PackedWeight) else len(weight)


def inputs_of(weight: ExpertWeights) -> int:
    return weight.inputs if isinstance(weight, PackedWeight) else weight.shape[2]


def _multiply_gate_up(
    rows: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    alignment: Alignment,
    inner: Tensor,
    gate: dict[str, str | float],
    tile: GemmTile,
) -> None:
    """Fill `inner` from `rows`, one for each token or one for each pair. `tile`: of a plain weight."""
    if isinstance(weight, PackedWeight):
        packed_gate_up(rows, weight, bias, alignment, inner, gate)
        return
    num_pairs, size = inner.shape
    shape = gate_up_shape(num_pairs // len(rows), size, rows.shape[1], gate)
    gate_up_kernel[(triton.cdiv(size, tile.outputs), len(alignment.owner))](
        rows, weight, alignment.pairs, alignment.owner, bias, inner, num_pairs,
        **shape, **tile_constants(alignment.rows, tile), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _multiply_down(
    inner: Tensor, weight: ExpertWeights, bias: Tensor | None, alignment: Alignment, results: Tensor, tile: GemmTile
) -> None:
    if isinstance(weight, PackedWeight):
        packed_down(inner, weight, bias, alignment, results)
        return
    num_pairs, size = results.shape
    down_kernel[(triton.cdiv(size, tile.outputs), len(alignment.owner))](
        inner, weight, alignment.pairs, alignment.owner, bias, results, num_pairs,
        **down_shape(size, inner.shape[1]), **tile_constants(alignment.rows, tile),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def gate_up_shape(chosen: int, inner: int, depth: int, gate: dict[str, str | float]) -> dict[str, int | str | float]:
    """What `gate_up_kernel` is compiled for, but for its tile; `gate`: `product_constants`."""
    return {"CHOSEN": chosen, "INNER": inner, "DEPTH": depth, **gate}


def down_shape(size: int, depth: int) -> dict[str, int]:
    """What `down_kernel` is compiled for, but for its tile."""
    return {"SIZE": size, "DEPTH": depth}


def tile_constants(rows: int, tile: GemmTile) -> dict[str, int]:
    """What both are compiled for besides."""
    return {"ROWS": rows, "OUTPUTS": tile.outputs, "BLOCK_K": tile.depth}
