"""Experts of a sparse feed-forward block, all at once, without the host knowing who chose whom.

    pairs      p = t · k + rank, one for each of a token's k experts
    align      pairs are sorted by expert, in order, each expert's padded to whole blocks of BLOCK_ROWS:
               sorted [blocks · BLOCK_ROWS] of pairs, T · k for padding; owner [blocks] of experts, −1 for none
    gate, up   inner[p] = round(activation(round(x[t] Gᵀ))) · round(x[t] Uᵀ), the halves G and U of the expert's weight
    down       result[p] = inner[p] Dᵀ
    combine    out[t] = Σ over ranks of round(result[t · k + rank] · w[t, rank]), best expert first, summed in float32

Shapes: x [T, H]; experts [T, k] int64, weights [T, k]; gate_up [E, 2 · I, H], gate first, down [E, H, I]; out [T, H].
x, weights and both weights of experts have one dtype, and every `round` is to it: those are the places where
`model.layers.moe` rounds. Products are summed in float32 (float32 inputs in IEEE arithmetic), in another order than
torch's.

Tiling: align is counting: program e counts its expert's pairs, then places them. A program of a product has the
BLOCK_ROWS rows of one block and a tile of the outputs, gathers its rows by `sorted`, and walks over the inputs
BLOCK_K at a time; the one of gate and up sums both and never writes them. There are as many blocks as the worst
choice needs, and those without owner end at once: shapes follow from T alone, so the launches can be part of a CUDA
graph.

One tile size serves every batch. With 64 rows a block reads a weight once for 64 multiply-adds, which is less than
what a device computes while it reads one (H200: 206), so a single token still takes the time of reading its experts;
and the order of a row's sum does not depend on T, so neither does its result.

Source: the alignment as in vLLM's and SGLang's moe_align_block_size, here stable and without atomics; the grouped
product as in Triton's grouped GEMM tutorial.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.gated_activation import ACTIVATIONS, activated
from tandem_engine.kernels.rounding import rounded

BLOCK_ROWS = 64
BLOCK_PAIRS = 1024
"""Pairs that a program of the alignment looks at together."""
COMBINE = 1024
"""Numbers of a program of `combine_kernel`."""


class GemmTile(NamedTuple):
    """How a product is cut."""

    outputs: int
    depth: int
    num_warps: int
    num_stages: int


GATE_UP = GemmTile(outputs=64, depth=64, num_warps=4, num_stages=3)
DOWN = GemmTile(outputs=128, depth=64, num_warps=4, num_stages=3)


class Alignment(NamedTuple):
    """Who computes what."""

    pairs: Tensor
    """int32 [blocks · BLOCK_ROWS]"""
    owner: Tensor
    """int32 [blocks]"""


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(experts, counts, num_pairs, BLOCK: tl.constexpr):
    """counts[e] = pairs that chose e; program e."""
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        total += (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_kernel(
    experts,
    counts,
    pairs,
    owner,
    num_pairs,
    num_blocks,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pairs of expert e in order, from its first block on, and padding behind; program EXPERTS: blocks of nobody."""
    expert = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    blocks = (tl.load(counts + index, mask=index < EXPERTS, other=0) + ROWS - 1) // ROWS
    first = tl.sum(tl.where(index < expert, blocks, 0), axis=0)
    if expert == EXPERTS:
        for block in range(first, num_blocks):
            tl.store(owner + block, -1)
    else:
        mine = tl.sum(tl.where(index == expert, blocks, 0), axis=0)
        for block in range(first, first + mine):
            tl.store(owner + block, expert)
        place = first * ROWS
        for start in range(0, num_pairs, BLOCK):
            pair = start + tl.arange(0, BLOCK)
            chosen = (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
            tl.store(pairs + place + tl.cumsum(chosen, axis=0) - 1, pair, mask=chosen > 0)
            place += tl.sum(chosen, axis=0)
        row = tl.arange(0, ROWS)
        tl.store(pairs + place + row, tl.full((ROWS,), num_pairs, tl.int32), mask=place + row < (first + mine) * ROWS)


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,
    weight,
    pairs,
    owner,
    inner,
    num_pairs,
    CHOSEN: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
        dtype = inner.dtype.element_ty
        product = rounded(activated(rounded(gate, dtype), ACTIVATION), dtype) * rounded(up, dtype)
        target = inner + pair[:, None] * INNER + output[None, :]
        tl.store(target, product.to(dtype), mask=live_row[:, None] & live_output[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    inner,
    weight,
    pairs,
    owner,
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
        target = results + pair[:, None] * SIZE + output[None, :]
        tl.store(target, total.to(results.dtype.element_ty), mask=live_row[:, None] & live_output[None, :])


@triton.jit
def combine_kernel(results, weights, out, CHOSEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [i · BLOCK, (i + 1) · BLOCK) of out[t]; program (t, i)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < SIZE
    dtype = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(CHOSEN):
        pair = token * CHOSEN + rank
        result = tl.load(results + pair * SIZE + column, mask=live, other=0.0).to(tl.float32)
        total += rounded(result * tl.load(weights + pair).to(tl.float32), dtype)
    tl.store(out + token * SIZE + column, total.to(dtype), mask=live)


def fused_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, activation: str
) -> Tensor:
    """What the chosen experts make of x, weighted and added: [T, H], dense. All arguments are dense."""
    assert activation in ACTIVATIONS, f"activation {activation!r} is none of {ACTIVATIONS}"
    tokens, size = x.shape
    chosen, num_experts, inner_size = experts.shape[1], gate_up.shape[0], down.shape[2]
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    num_pairs = tokens * chosen
    pairs, owner = align(experts, num_experts)
    inner = torch.empty((num_pairs, inner_size), dtype=x.dtype, device=x.device)
    results = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    gate_up_kernel[(triton.cdiv(inner_size, GATE_UP.outputs), len(owner))](
        x, gate_up, pairs, owner, inner, num_pairs, **gate_up_constants(chosen, inner_size, size, activation),
        num_warps=GATE_UP.num_warps, num_stages=GATE_UP.num_stages,
    )  # fmt: skip
    down_kernel[(triton.cdiv(size, DOWN.outputs), len(owner))](
        inner, down, pairs, owner, results, num_pairs, **down_constants(size, inner_size),
        num_warps=DOWN.num_warps, num_stages=DOWN.num_stages,
    )  # fmt: skip
    combine_kernel[(tokens, triton.cdiv(size, COMBINE))](
        results, weights, out, CHOSEN=chosen, SIZE=size, BLOCK=COMBINE, enable_fp_fusion=False
    )
    return out


def align(experts: Tensor, num_experts: int) -> Alignment:
    """Blocks of the pairs of `experts` [T, k] int64, dense."""
    num_pairs = experts.numel()
    # As many as T · k pairs need when they are spread over the experts as badly as they can be.
    num_blocks = min(num_pairs, num_experts) + num_pairs // BLOCK_ROWS
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    pairs = torch.empty(num_blocks * BLOCK_ROWS, dtype=torch.int32, device=experts.device)
    owner = torch.empty(num_blocks, dtype=torch.int32, device=experts.device)
    count_kernel[(num_experts,)](experts, counts, num_pairs, BLOCK=BLOCK_PAIRS)
    place_kernel[(num_experts + 1,)](
        experts, counts, pairs, owner, num_pairs, num_blocks,
        EXPERTS=num_experts, WIDTH=triton.next_power_of_2(num_experts), ROWS=BLOCK_ROWS, BLOCK=BLOCK_PAIRS,
    )  # fmt: skip
    return Alignment(pairs, owner)


def gate_up_constants(chosen: int, inner: int, depth: int, activation: str) -> dict[str, int | str]:
    """What `gate_up_kernel` is compiled for."""
    return {
        "CHOSEN": chosen,
        "INNER": inner,
        "DEPTH": depth,
        "ACTIVATION": activation,
        "ROWS": BLOCK_ROWS,
        "OUTPUTS": GATE_UP.outputs,
        "BLOCK_K": GATE_UP.depth,
    }


def down_constants(size: int, depth: int) -> dict[str, int]:
    """What `down_kernel` is compiled for."""
    return {"SIZE": size, "DEPTH": depth, "ROWS": BLOCK_ROWS, "OUTPUTS": DOWN.outputs, "BLOCK_K": DOWN.depth}
