"""Work of a sparse block: the pairs of tokens and experts in blocks of one expert each, and their sum.

    pairs      p = t · k + rank, one for each of a token's k experts
    align      pairs are sorted by expert, in order, each expert's padded to whole blocks of `rows`:
               pairs [blocks · rows], T · k for padding; owner [blocks] of experts, −1 for none
    combine    out[t] = Σ over ranks of round(result[t · k + rank] · w[t, rank]), best expert first, summed in float32

Shapes: experts [T, k] int64, weights [T, k], results [T · k, H], out [T, H]. `round` is to the dtype of `out`.

Tiling: align is counting: program e counts its expert's pairs, then places them. There are as many blocks as the worst
choice needs, and those without owner end at once: shapes follow from T alone, so the launches can be part of a CUDA
graph. A program of combine has COMBINE numbers of one token.

Source: as in vLLM's and SGLang's moe_align_block_size, here stable and without atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.triton.common import rounded

BLOCK_PAIRS = 1024
"""Pairs that a program of the alignment reads together."""

COMBINE = 1024
"""Numbers of a program of `combine_kernel`."""


class Alignment(NamedTuple):
    """Which blocks compute which pairs."""

    pairs: Tensor
    """int32 [blocks · rows]"""
    owner: Tensor
    """int32 [blocks]"""
    rows: int
    """Of a block."""


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
    """Pairs of expert e in order, from its first block on, and padding behind; program EXPERTS: blocks of no expert."""
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


def align(experts: Tensor, num_experts: int, rows: int) -> Alignment:
    """Blocks of `rows` of the pairs of `experts` [T, k] int64, dense."""
    num_pairs = experts.numel()
    # As many as T · k pairs need when they are spread over the experts as badly as they can be.
    num_blocks = min(num_pairs, num_experts) + num_pairs // rows
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    pairs = torch.empty(num_blocks * rows, dtype=torch.int32, device=experts.device)
    owner = torch.empty(num_blocks, dtype=torch.int32, device=experts.device)
    count_kernel[(num_experts,)](experts, counts, num_pairs, BLOCK=BLOCK_PAIRS)
    place_kernel[(num_experts + 1,)](
        experts, counts, pairs, owner, num_pairs, num_blocks,
        EXPERTS=num_experts, WIDTH=triton.next_power_of_2(num_experts), ROWS=rows, BLOCK=BLOCK_PAIRS,
    )  # fmt: skip
    return Alignment(pairs, owner, rows)


def combine(results: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill `out` [T, H], dense, with the weighted sums of `results` [T · k, H]."""
    tokens, size = out.shape
    combine_kernel[(tokens, triton.cdiv(size, COMBINE))](
        results, weights, out, CHOSEN=weights.shape[1], SIZE=size, BLOCK=COMBINE, enable_fp_fusion=False
    )
