"""Attention over pages of latents (MLA, absorbed): one key of RANK + TURNED numbers per token, whose beginning is V.

All query heads read the same key, so a tile has keys as its rows and queries as its columns, the other way around than
in `attention_block`:

    s      = (c·q + r·q') · scale       [keys, queries]     c, r: latent and rotated part of the keys, q, q' of queries
    m'     = max(m, max over keys of s), weights = 2^(s − m'), total = total · 2^(m − m') + Σ weights
    acc    = acc · 2^(m − m') + cᵀ·w    [RANK, queries]

A tensor core takes many rows at once: here those are keys, and numbers of a latent, of which there are enough, and not
heads. The operands stay in shared memory, where each block of c is put once for both of its products. A column is
m = query · HEADS + head of a row of the batch.

    split     decodes: one program for each (item of `work_list`, tile of columns), or several one after the other. A
              row of one split is finished here; `decode_attention.combine_kernel` combines the others.
    extend    prompts: one program for each tile of columns, which goes over all keys that they see

    q         [T, HEADS, RANK + TURNED], queries of a row adjacent, dense
    latents   [pages, 1, PAGE_SIZE, RANK + TURNED] of one layer, dense but for the first dimension
    out       [T, HEADS, RANK], dense

Pages, masks and what is not read are as in `attention_block`; lists, splits and promises as in `decode_attention`.

Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1 and appendix C.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.triton.attention_block import FEWEST, factors, page_ids
from tandem_engine.kernels.triton.decode_attention import Partials, combine_kernel, combine_warps, decode_constants
from tandem_engine.kernels.triton.work_list import ALL, Rows, Splitting, WorkList, visible_splits

MAX_RANK = 512
"""Of a latent that tiles have registers for."""

COLUMNS = 64
"""Of a tile of prompts, and the most of one of decodes."""

MAX_SHARED = 32
"""Heads of a rank whose decodes have tiles of 16 columns: two of them read the same keys."""

_ALL = tl.constexpr(ALL)


@triton.jit
def load_queries(q, live, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [FIRST, FIRST + SIZE) of the queries that `q` [M] points to, as columns: [BLOCK, M]."""
    number = tl.arange(0, BLOCK)[:, None]
    return tl.load(q[None, :] + FIRST + number, mask=live[None, :] & (number < SIZE), other=0.0)


@triton.jit
def attend_latents(
    q,
    q_turned,
    highest,
    total,
    acc,
    block,
    page,
    end,
    high,
    latents,
    page_stride,
    scale,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Let columns of q [BLOCK_R, M] and q_turned [BLOCK_T, M] see tokens [block, block + BLOCK_N).

    Returns highest [M], total [M], acc [BLOCK_R, M].

    page     of `page_ids`
    end      [M] column m sees tokens before end[m]; it counts with MASKED alone
    high     no column sees a token from here on
    MASKED   false if all columns see all tokens of the block
    """
    token = block + tl.arange(0, BLOCK_N)
    number, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    at = latents + (page.to(tl.int64) * page_stride + (token % PAGE_SIZE) * (RANK + TURNED))[:, None]
    if MASKED:
        live = token < high
        c = tl.load(at + number[None, :], mask=live[:, None] & (number < RANK)[None, :], other=0.0)
        r = tl.load(at + RANK + turned[None, :], mask=live[:, None] & (turned < TURNED)[None, :], other=0.0)
    else:
        c = tl.load(at + number[None, :], mask=(number < RANK)[None, :], other=0.0)
        r = tl.load(at + RANK + turned[None, :], mask=(turned < TURNED)[None, :], other=0.0)
    c, r = c.to(q.dtype), r.to(q.dtype)
    s = tl.dot(c, q, input_precision="ieee")
    s = tl.dot(r, q_turned, s, input_precision="ieee") * scale
    if MASKED:
        s = tl.where(live[:, None] & (token[:, None] < end[None, :]), s, float("-inf"))
    new = tl.maximum(highest, tl.max(s, axis=0))
    # A column that has seen nothing yet counts from 0, for −∞ − −∞ is no number.
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    weights = tl.exp2(s - base[None, :])
    factor = tl.exp2(highest - base)
    total = total * factor + tl.sum(weights, axis=0)
    acc = tl.dot(tl.trans(c), weights.to(c.dtype), acc * factor[None, :], input_precision="ieee")
    return new, total, acc


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "extend_lens", "seq_lens"],
)
def latent_split_kernel(
    q,
    latents,
    out,
    page_table,
    extend_lens,
    seq_lens,
    starts,
    items,
    totals,
    partial,
    partial_stats,
    scale,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Items i, i + programs, … times tiles of columns; program i. Tiles of an item, which share keys, are adjacent."""
    TILES: tl.constexpr = (MAX_QUERIES * HEADS + BLOCK_M - 1) // BLOCK_M
    for work in range(tl.program_id(0), tl.load(totals) * TILES, tl.num_programs(0)):
        item = work // TILES
        m = work % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        packed = tl.load(items + item)
        row = packed // MAX_SPLITS
        q_len = tl.load(extend_lens + row)
        seq_len = tl.load(seq_lens + row)
        _, length, splits = visible_splits(q_len, seq_len, 0, _ALL, MIN_SPLIT, MAX_SPLITS)
        low = packed % MAX_SPLITS * length
        high = tl.minimum(low + length, seq_len)

        live = m < q_len * HEADS
        first = tl.load(starts + row).to(tl.int64) * HEADS
        q_at = q + (first + m) * (RANK + TURNED)
        query = load_queries(q_at, live, 0, RANK, BLOCK_R)
        q_turned = load_queries(q_at, live, RANK, TURNED, BLOCK_T)
        end = tl.where(live, seq_len - q_len + m // HEADS + 1, 0)

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        table = page_table + row.to(tl.int64) * table_stride
        last = (high - 1) // PAGE_SIZE
        page = page_ids(table, low, last, PAGE_SIZE, BLOCK_N)
        for block in range(low, high, BLOCK_N):
            highest, total, acc = attend_latents(
                query, q_turned, highest, total, acc, block, page, end, high, latents, page_stride, scale,
                True, PAGE_SIZE, RANK, TURNED, BLOCK_N, BLOCK_R, BLOCK_T,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        number = tl.arange(0, BLOCK_R)[:, None]
        stored = live[None, :] & (number < RANK)
        if splits == 1:
            place = out + (first + m)[None, :] * RANK + number
            tl.store(place, (acc / total[None, :]).to(out.dtype.element_ty), mask=stored)
        else:
            part = item.to(tl.int64) * (MAX_QUERIES * HEADS) + m
            tl.store(partial + part[None, :] * RANK + number, acc, mask=stored)
            tl.store(partial_stats + part * 2, highest, mask=live)
            tl.store(partial_stats + part * 2 + 1, total, mask=live)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "extend_lens", "seq_lens"],
)
def latent_extend_kernel(
    q,
    latents,
    out,
    page_table,
    extend_lens,
    seq_lens,
    starts,
    tile_rows,
    tile_numbers,
    totals,
    scale,
    page_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Tile i; program i."""
    if tl.program_id(0) < tl.load(totals + 1):
        row = tl.load(tile_rows + tl.program_id(0))
        first_m = tl.load(tile_numbers + tl.program_id(0)) * BLOCK_M
        q_len = tl.load(extend_lens + row)
        prefix = tl.load(seq_lens + row) - q_len

        m = first_m + tl.arange(0, BLOCK_M)
        live = m < q_len * HEADS
        first = tl.load(starts + row).to(tl.int64) * HEADS
        q_at = q + (first + m) * (RANK + TURNED)
        query = load_queries(q_at, live, 0, RANK, BLOCK_R)
        q_turned = load_queries(q_at, live, RANK, TURNED, BLOCK_T)
        high = prefix + tl.minimum((first_m + BLOCK_M - 1) // HEADS + 1, q_len)
        masked = (prefix + first_m // HEADS + 1) // BLOCK_N * BLOCK_N

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        table = page_table + row.to(tl.int64) * table_stride
        last = (high - 1) // PAGE_SIZE
        page = page_ids(table, prefix * 0, last, PAGE_SIZE, BLOCK_N)
        for block in range(0, masked, BLOCK_N):
            highest, total, acc = attend_latents(
                query, q_turned, highest, total, acc, block, page, m, high, latents, page_stride, scale,
                False, PAGE_SIZE, RANK, TURNED, BLOCK_N, BLOCK_R, BLOCK_T,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        # Columns behind the last query see as much as any, so that they are masked nowhere; they are not stored.
        end = prefix + m // HEADS + 1
        for block in range(masked, high, BLOCK_N):
            highest, total, acc = attend_latents(
                query, q_turned, highest, total, acc, block, page, end, high, latents, page_stride, scale,
                True, PAGE_SIZE, RANK, TURNED, BLOCK_N, BLOCK_R, BLOCK_T,
            )  # fmt: skip
            page = page_ids(table, block + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        number = tl.arange(0, BLOCK_R)[:, None]
        place = out + (first + m)[None, :] * RANK + number
        tl.store(place, (acc / total[None, :]).to(out.dtype.element_ty), mask=live[None, :] & (number < RANK))


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentTiling:
    """Columns of a tile, keys of a block, and how programs run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    """One more than the blocks of latents that shared memory holds on Hopper."""
    resident: int
    """Programs of decodes that a multiprocessor runs at once."""


def latent_tilings(heads: int, itemsize: int, shared_bytes: int, *, width: int) -> tuple[LatentTiling, LatentTiling]:
    """Of decodes and of prompts, of `heads` query heads of `itemsize` bytes over latents of `width` numbers.

    Two blocks of 32 keys and the queries leave room for a second program of 16 columns. The results of 64 columns fill
    the registers of 8 warps. A block of 64 keys would leave either with fewer, and tiles of 32 columns spill. Before
    Hopper products are multiplied from registers, which leaves none for more than 16 columns.
    """
    if itemsize > 2:
        # Multiplied without tensor cores, by threads that hold what they multiply.
        small = LatentTiling(block_m=FEWEST, block_n=FEWEST, num_warps=8, num_stages=2, resident=1)
        return small, small
    taken = (2 * 32 + FEWEST) * width * itemsize
    resident = max(1, min(2, shared_bytes // taken))
    few = LatentTiling(block_m=FEWEST, block_n=32, num_warps=4, num_stages=3, resident=resident)
    if shared_bytes < 200 << 10:
        return few, few
    many = LatentTiling(block_m=COLUMNS, block_n=32, num_warps=8, num_stages=3, resident=1)
    return few if heads <= MAX_SHARED else many, many


def latent_splitting(*, heads: int, max_queries: int, block_m: int) -> Splitting:
    """Splits are longer than those of K and V: what one leaves has 2 KiB for each head, as much as two latents.

    With 16 heads, 256 tokens are 288 KiB, and partial results 32 KiB, which are written and read again.
    """
    return Splitting(
        group=heads,
        max_queries=max(1, min(max_queries, COLUMNS // heads)),
        min_split=256 if heads <= MAX_SHARED else 512,
        max_splits=64 if heads <= MAX_SHARED else 32,
        block_m=block_m,
    )


def latent_attention(
    q: Tensor,
    latents: Tensor,
    out: Tensor,
    rows: Rows,
    work: WorkList,
    partials: Partials,
    *,
    scale: float,
    decode: LatentTiling,
    extend: LatentTiling,
    multiprocessors: int,
) -> None:
    """Write the results of all rows to `out`.

    Args:
        q: [T, heads, width], dense.
        latents: [pages, 1, page_size, width] of one layer, dense but for the first dimension.
        out: [T, heads, rank], dense: values are the first `rank` numbers of a latent.
        multiprocessors: of the device: as many programs are launched as they run at once.
    """
    _check_layout(q, latents, out)
    splitting, heads = work.splitting, q.shape[1]
    scale, _ = factors(scale, None)
    strides = latents.stride(0), rows.page_table.stride(0)
    lens = rows.page_table, rows.extend_lens, rows.seq_lens
    rank = out.shape[2]
    tiles = triton.cdiv(splitting.max_queries * heads, decode.block_m)
    latent_split_kernel[(min(multiprocessors * decode.resident, len(work.items) * tiles),)](
        q, latents, out, *lens, work.starts, work.items, work.totals, partials.acc, partials.stats, scale, *strides,
        **split_constants(splitting), **latent_constants(latents, heads=heads, rank=rank, tiling=decode),
        num_warps=decode.num_warps, num_stages=decode.num_stages,
    )  # fmt: skip
    constants = decode_constants(splitting, 1, rank, span=ALL)
    combine_kernel[(len(work.starts), splitting.max_queries * heads)](
        partials.acc, partials.stats, out, rows.extend_lens, rows.seq_lens, work.starts, work.first_items, 0,
        **constants, num_warps=combine_warps(constants),
    )  # fmt: skip
    if work.has_tiles:
        assert extend.block_m == splitting.block_m, f"tiles of {extend.block_m}, lists for {splitting.block_m}"
        latent_extend_kernel[(len(work.tile_rows),)](
            q, latents, out, *lens, work.starts, work.tile_rows, work.tile_numbers, work.totals, scale, *strides,
            **latent_constants(latents, heads=heads, rank=rank, tiling=extend),
            num_warps=extend.num_warps, num_stages=extend.num_stages,
        )  # fmt: skip


def latent_constants(latents: Tensor, *, heads: int, rank: int, tiling: LatentTiling) -> dict[str, int]:
    """What both kernels are compiled for."""
    _, _, page_size, width = latents.shape
    return {
        "HEADS": heads,
        "RANK": rank,
        "TURNED": width - rank,
        "PAGE_SIZE": page_size,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_R": max(FEWEST, triton.next_power_of_2(rank)),
        "BLOCK_T": max(FEWEST, triton.next_power_of_2(width - rank)),
    }


def split_constants(splitting: Splitting) -> dict[str, int]:
    """What `latent_split_kernel` is compiled for besides."""
    return {
        "MAX_QUERIES": splitting.max_queries,
        "MIN_SPLIT": splitting.min_split,
        "MAX_SPLITS": splitting.max_splits,
    }


def _check_layout(q: Tensor, latents: Tensor, out: Tensor) -> None:
    """Kernels compute addresses of what is dense from its shape alone."""
    _, one, page_size, width = latents.shape
    assert one == 1, f"latents of {one} heads"
    assert latents.stride()[1:] == (page_size * width, width, 1), f"pages of strides {latents.stride()}"
    assert q.shape[2] == width, f"q has heads of {q.shape[2]}, latents {width} numbers"
    assert q.is_contiguous(), f"q of strides {q.stride()}"
    assert out.shape[:2] == q.shape[:2], f"out of shape {tuple(out.shape)}, q of {tuple(q.shape)}"
    assert out.is_contiguous(), f"out of strides {out.stride()}"
