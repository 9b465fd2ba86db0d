"""Attention of few queries per sequence over pages: decodes, and verification of a few drafts. Bound by bandwidth.

Split-KV (flash-decoding): a sequence's visible tokens are cut into splits (`work_list`), so that one long sequence
keeps a whole device busy. Two kernels:

    split     one program for each (item, K/V head), or several one after the other. The query heads that share the
              head, for all of the row's queries, are the rows of one tensor-core tile: row m is query m // GROUP,
              head m % GROUP. So K and V are read once. A row of one split is finished here. A layer's sinks are the
              first scores of the first split of a row, and of no other.
    combine   one program for each (row, query, head): Σ acc · 2^(m − M) / Σ total · 2^(m − M) over its splits, where
              M is the highest m. A row without tokens gets zeros.

    q, out           [T, KV_HEADS · GROUP, HEAD_DIM], queries of a row adjacent, heads dense
    keys, values     [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] of one layer, dense but for the first dimension
    partial          [items, KV_HEADS, ROWS, HEAD_DIM] float32, with partial_stats [items, KV_HEADS, ROWS, 2] (m, total)
                     where ROWS = MAX_QUERIES · GROUP

The grid is the programs that the device runs at once, each of which takes every so-many-th item: it depends on no
length, so that a CUDA graph holds for any batch, and short rows cost nothing. The number of programs does not change
results: the order of sums follows from the row alone.

Source: Dao et al., Flash-Decoding for long-context inference, 2023; Hong et al., FlashDecoding++, 2023.
"""

from dataclasses import dataclass

import torch
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
from tandem_engine.kernels.triton.work_list import (
    Bounds,
    Rows,
    Splitting,
    WorkList,
    first_seen,
    span_constant,
    visible_splits,
)

COMBINED_AT_ONCE = tl.constexpr(32)
"""Splits that `combine_kernel` has in flight."""


@triton.jit(
    do_not_specialize=["table_stride", "span"],
    do_not_specialize_on_alignment=["page_table", "extend_lens", "seq_lens"],
)
def split_kernel(
    q,
    keys,
    values,
    out,
    page_table,
    extend_lens,
    seq_lens,
    starts,
    items,
    totals,
    partial,
    partial_stats,
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
    MAX_QUERIES: tl.constexpr,
    SPAN: tl.constexpr,
    CAPPED: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Items i, i + programs, … times K/V heads; program i."""
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    dims = (column < HEAD_DIM)[None, :]
    for work in range(tl.program_id(0), tl.load(totals) * KV_HEADS, tl.num_programs(0)):
        item, head = work // KV_HEADS, work % KV_HEADS
        packed = tl.load(items + item)
        row = packed // MAX_SPLITS
        q_len = tl.load(extend_lens + row)
        seq_len = tl.load(seq_lens + row)
        low, length, splits = visible_splits(q_len, seq_len, span, SPAN, MIN_SPLIT, MAX_SPLITS)
        begin = (low // length + packed % MAX_SPLITS) * length
        low, high = tl.maximum(begin, low), tl.minimum(begin + length, seq_len)

        token = (tl.load(starts + row) + m // GROUP).to(tl.int64)[:, None]
        query_head = (head * GROUP + m % GROUP)[:, None]
        live = (m < q_len * GROUP)[:, None] & dims
        tile = tl.load(q + token * token_stride + query_head * HEAD_DIM + column[None, :], mask=live, other=0.0)
        tile = operand(tile, keys)
        end = tl.where(m < q_len * GROUP, seq_len - q_len + m // GROUP + 1, 0)

        factor = scale
        if k_scale is not None:
            factor = scale * tl.load(k_scale + head)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:  # noqa: SIM102 - decided when the kernel is compiled
            if packed % MAX_SPLITS == 0:
                highest = sink_scores(sinks, head * GROUP + m % GROUP)
                total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        of_head = head * (PAGE_SIZE * HEAD_DIM)
        table = page_table + row.to(tl.int64) * table_stride
        last = (high - 1) // PAGE_SIZE
        page = page_ids(table, low // BLOCK_N * BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        for block in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
            highest, total, acc = attend_block(
                tile, highest, total, acc, block, page, first_seen(end, span, SPAN), end, low, high,
                keys + of_head, values + of_head, page_stride, factor, cap,
                True, SPAN > 0, CAPPED, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        if v_scale is not None:
            acc = acc * tl.load(v_scale + head)
        if splits == 1:
            place = out + (token * (KV_HEADS * GROUP) + query_head) * HEAD_DIM + column[None, :]
            tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)
        else:
            part = tl.cast(work, tl.int64) * (MAX_QUERIES * GROUP) + m
            tl.store(partial + part[:, None] * HEAD_DIM + column[None, :], acc, mask=live)
            tl.store(partial_stats + part * 2, highest, mask=m < q_len * GROUP)
            tl.store(partial_stats + part * 2 + 1, total, mask=m < q_len * GROUP)


@triton.jit(do_not_specialize=["span"], do_not_specialize_on_alignment=["extend_lens", "seq_lens"])
def combine_kernel(
    partial,
    partial_stats,
    out,
    extend_lens,
    seq_lens,
    starts,
    first_items,
    span,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    SPAN: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Query head j % (KV_HEADS · GROUP) of query j // (KV_HEADS · GROUP) of row i; program (i, j)."""
    row = tl.program_id(0)
    query, query_head = tl.program_id(1) // (KV_HEADS * GROUP), tl.program_id(1) % (KV_HEADS * GROUP)
    q_len = tl.load(extend_lens + row)
    seq_len = tl.load(seq_lens + row)
    _, _, splits = visible_splits(q_len, seq_len, span, SPAN, MIN_SPLIT, MAX_SPLITS)
    if (q_len <= MAX_QUERIES) & (query < q_len) & (splits != 1):
        head = query_head // GROUP
        m = query * GROUP + query_head % GROUP
        column = tl.arange(0, BLOCK_D)
        first = tl.load(first_items + row).to(tl.int64)
        highest, total = float("-inf"), 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for chunk in range(0, splits, COMBINED_AT_ONCE):
            split = chunk + tl.arange(0, COMBINED_AT_ONCE)
            live = split < splits
            place = ((first + split) * KV_HEADS + head) * (MAX_QUERIES * GROUP) + m
            part_highest = tl.load(partial_stats + place * 2, mask=live, other=float("-inf"))
            part_total = tl.load(partial_stats + place * 2 + 1, mask=live, other=0.0)
            part = tl.load(
                partial + place[:, None] * HEAD_DIM + column[None, :],
                mask=live[:, None] & (column < HEAD_DIM)[None, :],
                other=0.0,
            )
            new = tl.maximum(highest, tl.max(part_highest, axis=0))
            # A query that sees a later chunk than others of its row sees nothing in the first splits.
            base = tl.where(new == float("-inf"), 0.0, new)
            before, share = tl.exp2(highest - base), tl.exp2(part_highest - base)
            total = total * before + tl.sum(part_total * share, axis=0)
            acc = acc * before + tl.sum(part * share[:, None], axis=0)
            highest = new
        result = tl.where(seq_len > 0, acc / total, 0.0)
        token = (tl.load(starts + row) + query).to(tl.int64)
        place = out + (token * (KV_HEADS * GROUP) + query_head) * HEAD_DIM + column
        tl.store(place, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTiling:
    """Keys of a block, and how programs run."""

    block_n: int
    num_stages: int
    """One more than the blocks of K and V that shared memory holds."""
    resident: int
    """Programs that a multiprocessor runs at once."""
    most_registers: int | None = None
    """Of a thread; None leaves the number to the assembler."""
    num_warps: int = 4


def decode_tiling(head_dim: int, itemsize: int, shared_bytes: int, *, pool_itemsize: int, block_m: int) -> DecodeTiling:
    """How rows are computed on a device with `shared_bytes` of shared memory for a block.

    A multiprocessor has to have some 26 KiB of K and V in flight at any moment for the bandwidth of a Hopper card:
    three programs of two blocks have several times that. float32 is multiplied without tensor cores, from registers
    that a second block would not leave enough of.

    Args:
        itemsize: bytes of a number of the queries.
        pool_itemsize: bytes of a number of the pool.
        block_m: rows of a tile (`decode_block_m`).
    """
    wide, small = head_dim > 128, shared_bytes < 160 << 10
    registers = None
    if itemsize > 2:
        block_n, stages, most = 16, 2, 4
    elif pool_itemsize == 1:
        block_n, stages, most, registers = 32 if wide else 64, 3, 3, 168
    elif wide:
        block_n, stages, most = 16 if small else 32, 3, 2
    else:
        block_n, stages, most = 32 if small else 64, 3, 3
    width = triton.next_power_of_2(head_dim)
    blocks = (stages - 1) * 2 * block_n * width * pool_itemsize
    tile = block_m * width * 3
    return DecodeTiling(
        block_n=block_n,
        num_stages=stages,
        resident=max(1, min(most, shared_bytes // (blocks + tile))),
        most_registers=registers,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Partials:
    """What splits leave for `combine_kernel`: used by one layer after the other."""

    acc: Tensor
    stats: Tensor

    @classmethod
    def empty(
        cls, splitting: Splitting, bounds: Bounds, *, kv_heads: int, head_dim: int, device: torch.device
    ) -> "Partials":
        parts = splitting.items(bounds) * kv_heads * splitting.max_queries * splitting.group
        acc = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        return cls(acc=acc, stats=torch.empty(parts * 2, dtype=torch.float32, device=device))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    rows: Rows,
    work: WorkList,
    partials: Partials,
    *,
    scale: float,
    soft_cap: float | None,
    tiling: DecodeTiling,
    multiprocessors: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write the results of all rows with at most `max_queries` queries to `out`, and nothing else.

    Args:
        q: [T, heads, head_dim], tokens any distance apart.
        keys, values: [pages, kv_heads, page_size, head_dim] of one layer, dense but for the first dimension.
        out: [T, heads, head_dim], dense.
        multiprocessors: of the device: as many programs are launched as they run at once.
        k_scale, v_scale: float32 [kv_heads], what numbers of a pool in float8 are multiplied with; None is 1.
        sinks: float32 [heads], dense.
    """
    check_layout(q, keys, values, out)
    kv_heads, page_size, head_dim = keys.shape[1:]
    splitting = work.splitting
    constants = decode_constants(splitting, kv_heads, head_dim, span=span_constant(work.span))
    scale, cap = factors(scale, soft_cap)
    split_kernel[(min(multiprocessors * tiling.resident, len(work.items) * kv_heads),)](
        q, keys, values, out, rows.page_table, rows.extend_lens, rows.seq_lens, work.starts, work.items, work.totals,
        partials.acc, partials.stats, k_scale, v_scale, sinks, scale, cap, work.length,
        q.stride(0), keys.stride(0), rows.page_table.stride(0),
        PAGE_SIZE=page_size, CAPPED=soft_cap is not None, BLOCK_N=tiling.block_n,
        BLOCK_M=decode_block_m(splitting), **constants,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.most_registers,
    )  # fmt: skip
    combine_kernel[(len(work.starts), splitting.max_queries * q.shape[1])](
        partials.acc, partials.stats, out, rows.extend_lens, rows.seq_lens, work.starts, work.first_items, work.length,
        **constants, num_warps=combine_warps(constants),
    )  # fmt: skip


def decode_constants(splitting: Splitting, kv_heads: int, head_dim: int, *, span: int) -> dict[str, int | bool]:
    """What both kernels are compiled for."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": splitting.group,
        "HEAD_DIM": head_dim,
        "MAX_QUERIES": splitting.max_queries,
        "SPAN": span,
        "MIN_SPLIT": splitting.min_split,
        "MAX_SPLITS": splitting.max_splits,
        "BLOCK_D": max(FEWEST, triton.next_power_of_2(head_dim)),
    }


def combine_warps(constants: dict[str, int | bool]) -> int:
    """Of `combine_kernel`. Its programs are many and small: with 4 warps each they take twice as long (H200)."""
    return max(1, constants["BLOCK_D"] // 128)


def decode_block_m(splitting: Splitting) -> int:
    """Rows of a tile."""
    return max(FEWEST, int(triton.next_power_of_2(splitting.max_queries * splitting.group)))
