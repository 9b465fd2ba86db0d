"""Attention of prompts and their chunks over pages: a ragged batch after cached prefixes. Bound by arithmetic.

FlashAttention-2 with the query heads of a K/V head packed into the tile: one program for each (tile, K/V head), where
row m is query m // GROUP, head m % GROUP, counted over all of its sequence's queries. Query t stands at position
prefix_len + t and sees up to itself, the tokens of its window or chunk. A tile's blocks of keys are

       masked          full            masked
    |-----------|-----------------|--------------|
    low      seen by all rows           prefix_len + last query + 1

so that masks and bounds cost nothing where they decide nothing. Blocks out of sight are not visited. Loads of K and V
are pipelined (`num_stages`). A sequence's last tiles, which see most, come first.

    q, out           [T, KV_HEADS · GROUP, HEAD_DIM], queries of a row adjacent, heads dense
    keys, values     [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] of one layer, dense but for the first dimension

A layer's sinks are the first scores of each row.

Rows with few queries are left to `decode_attention`.

Source: Dao, FlashAttention-2, 2023; packing of heads as in FlashAttention-3 and FlashInfer.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.triton.attention_block import (
    FEWEST,
    attend_block,
    check_layout,
    factors,
    operand,
    page_ids,
    sink_scores,
)
from tandem_engine.kernels.triton.work_list import Rows, WorkList, first_seen, span_constant


@triton.jit(
    do_not_specialize=["table_stride", "span"],
    do_not_specialize_on_alignment=["page_table", "extend_lens", "seq_lens"],
)
def extend_kernel(
    q,
    keys,
    values,
    out,
    page_table,
    extend_lens,
    seq_lens,
    starts,
    tile_rows,
    tile_numbers,
    totals,
    k_scale,
    v_scale,
    sinks,
    scale,
    cap,
    span,
    token_stride,
    page_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tile i of K/V head j; program (i, j)."""
    if tl.program_id(0) < tl.load(totals + 1):
        row = tl.load(tile_rows + tl.program_id(0))
        first_m = tl.load(tile_numbers + tl.program_id(0)) * BLOCK_M
        head = tl.program_id(1)
        q_len = tl.load(extend_lens + row)
        prefix = tl.load(seq_lens + row) - q_len

        m = first_m + tl.arange(0, BLOCK_M)
        query = m // GROUP
        column = tl.arange(0, BLOCK_D)
        token = (tl.load(starts + row) + query).to(tl.int64)[:, None]
        query_head = (head * GROUP + m % GROUP)[:, None]
        live = (query < q_len)[:, None] & (column < HEAD_DIM)[None, :]
        tile = tl.load(q + token * token_stride + query_head * HEAD_DIM + column[None, :], mask=live, other=0.0)
        tile = operand(tile, keys)
        # Rows behind the last query see as much as any, so that they are masked nowhere; they are not stored.
        end = prefix + query + 1
        oldest = prefix + first_m // GROUP + 1
        high = prefix + tl.minimum((first_m + BLOCK_M - 1) // GROUP + 1, q_len)
        low = prefix * 0
        full = prefix * 0
        if SPAN:
            low = tl.maximum(first_seen(oldest, span, SPAN), 0)
            full = tl.cdiv(tl.maximum(first_seen(high, span, SPAN), 0), BLOCK_N) * BLOCK_N
        masked = tl.maximum(oldest // BLOCK_N * BLOCK_N, full)

        factor = scale
        if k_scale is not None:
            factor = scale * tl.load(k_scale + head)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            highest = sink_scores(sinks, head * GROUP + m % GROUP)
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        k_head = keys + head * (PAGE_SIZE * HEAD_DIM)
        v_head = values + head * (PAGE_SIZE * HEAD_DIM)
        table = page_table + row.to(tl.int64) * table_stride
        # Each loop begins at the block where the one before ended, so `page` passes from one to the next.
        last = (high - 1) // PAGE_SIZE
        page = page_ids(table, low // BLOCK_N * BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        if SPAN:
            for block in range(low // BLOCK_N * BLOCK_N, tl.minimum(full, high), BLOCK_N):
                highest, total, acc = attend_block(
                    tile, highest, total, acc, block, page, first_seen(end, span, SPAN), end, low, high,
                    k_head, v_head, page_stride, factor, cap,
                    True, True, CAPPED, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        for block in range(full, masked, BLOCK_N):
            highest, total, acc = attend_block(
                tile, highest, total, acc, block, page, end, end, low, high,
                k_head, v_head, page_stride, factor, cap,
                False, False, CAPPED, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        for block in range(masked, high, BLOCK_N):
            highest, total, acc = attend_block(
                tile, highest, total, acc, block, page, first_seen(end, span, SPAN), end, low, high,
                k_head, v_head, page_stride, factor, cap,
                True, SPAN > 0, CAPPED, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        if v_scale is not None:
            acc = acc * tl.load(v_scale + head)
        place = out + (token * (KV_HEADS * GROUP) + query_head) * HEAD_DIM + column[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtendTiling:
    """Query rows of a tile, keys of a block, and how programs run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def extend_tiling(head_dim: int, itemsize: int, shared_bytes: int) -> ExtendTiling:
    """For queries of `itemsize` bytes on a device with so much shared memory for a block.

    As large as nothing spills on sm_80 and sm_90, with a window and a cap too; the latter multiplies from shared memory
    and so has registers to spare. float32 is multiplied without tensor cores, by threads that hold what they multiply.
    """
    hopper, wide = shared_bytes >= 200 << 10, head_dim > 128
    if itemsize <= 2 and head_dim > 256:
        m, n, warps, stages = 32, 16, 8, 2
    elif itemsize > 2:
        m, n, warps, stages = (16, 16, 4, 2) if wide else (32, 16, 8, 3)
    elif shared_bytes < 160 << 10:
        m, n, warps, stages = (64, 32, 8, 2) if wide else (64, 32, 4, 2)
    elif wide:
        m, n, warps, stages = (128, 32, 8, 2) if hopper else (64, 32, 8, 2)
    else:
        m, n, warps, stages = (128, 64, 8, 3) if hopper or head_dim <= 64 else (128, 32, 8, 3)
    return ExtendTiling(block_m=m, block_n=n, num_warps=warps, num_stages=stages)


def extend_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    rows: Rows,
    work: WorkList,
    *,
    scale: float,
    soft_cap: float | None,
    tiling: ExtendTiling,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write the results of all rows with more than `max_queries` queries to `out`, and nothing else.

    Args:
        q: [T, heads, head_dim], tokens any distance apart.
        keys, values: [pages, kv_heads, page_size, head_dim] of one layer, dense but for the first dimension.
        out: [T, heads, head_dim], dense.
        k_scale, v_scale: float32 [kv_heads], what numbers of a pool in float8 are multiplied with; None is 1.
        sinks: float32 [heads], dense.
    """
    check_layout(q, keys, values, out)
    kv_heads, page_size, head_dim = keys.shape[1:]
    scale, cap = factors(scale, soft_cap)
    splitting = work.splitting
    assert tiling.block_m == splitting.block_m, f"tiles of {tiling.block_m}, lists for {splitting.block_m}"
    constants = extend_constants(
        group=splitting.group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        tiling=tiling, span=span_constant(work.span), capped=soft_cap is not None,
    )  # fmt: skip
    extend_kernel[(len(work.tile_rows), kv_heads)](
        q, keys, values, out, rows.page_table, rows.extend_lens, rows.seq_lens,
        work.starts, work.tile_rows, work.tile_numbers, work.totals, k_scale, v_scale, sinks,
        scale, cap, work.length, q.stride(0), keys.stride(0), rows.page_table.stride(0),
        **constants, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def extend_constants(
    *, group: int, kv_heads: int, head_dim: int, page_size: int, tiling: ExtendTiling, span: int, capped: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "SPAN": span,
        "CAPPED": capped,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": max(FEWEST, triton.next_power_of_2(head_dim)),
    }
