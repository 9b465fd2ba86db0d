"""Rows of tables that live on the device, read and written by index without the host.

    resolve    out[t]  = table[rows[t]] where input_ids[t] is RESOLVE, else input_ids[t]
    publish    table[rows[s]] = max(token_ids[s], 0)         a token that means nothing (−1) is published as 0
    gather     out[i]  = table[rows[i]]                      rows of any width and dtype
    scatter    table[rows[i]] = values[i]

The tables are indexed by req_pool_idx, of which row 0 is padding: padded entries read and write it, and what it holds
means nothing. A negative row is skipped; what is gathered for it is 0. Rows that are written are distinct, but for
row 0. Every launch has one shape for one batch bucket and reads indices on the device, so it can be part of a CUDA
graph.

Shapes: table [R] int64 or [R, W], dense; rows [N] int64; input_ids, token_ids [N] int64. Rows move as words of the
widest integer that divides them, so the dtype does not matter.

Tiling: programs of BLOCK entries, or of BLOCK words of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024

RESOLVE = -1
"""As `forward.batch` has it."""

_RESOLVE = tl.constexpr(RESOLVE)

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""By bytes, the widest first."""


@triton.jit(do_not_specialize=["count"])
def resolve_kernel(table, input_ids, rows, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    token = tl.load(input_ids + i, mask=live, other=0)
    unknown = live & (token == _RESOLVE)
    row = tl.load(rows + i, mask=unknown, other=0)
    tl.store(out + i, tl.where(unknown, tl.load(table + row, mask=unknown, other=0), token), mask=live)


@triton.jit(do_not_specialize=["count"])
def publish_kernel(table, rows, token_ids, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    row = tl.load(rows + i, mask=live, other=-1)
    token = tl.load(token_ids + i, mask=live, other=0)
    tl.store(table + row, tl.where(token < 0, 0, token), mask=row >= 0)


@triton.jit
def move_rows_kernel(table, values, rows, width, SCATTER: tl.constexpr, BLOCK: tl.constexpr):
    """Words of row rows[i] of the table from values[i], or to it; program (i, block of words)."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = word < width
    row = tl.load(rows + i)
    if row >= 0:
        if SCATTER:
            tl.store(table + row * width + word, tl.load(values + i * width + word, mask=live), mask=live)
        else:
            tl.store(values + i * width + word, tl.load(table + row * width + word, mask=live), mask=live)
    elif not SCATTER:
        tl.store(values + i * width + word, tl.zeros((BLOCK,), values.dtype.element_ty), mask=live)


def resolve_tokens(table: Tensor, input_ids: Tensor, rows: Tensor) -> Tensor:
    """Input ids [T] with every RESOLVE replaced by the token of its row; `rows` is [T]."""
    out = torch.empty_like(input_ids)
    if len(out):
        resolve_kernel[(triton.cdiv(len(out), BLOCK),)](table, input_ids, rows, out, len(out), BLOCK=BLOCK)
    return out


def publish_tokens(table: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Write `token_ids` [S] to `rows` [S] of the table."""
    if len(rows):
        publish_kernel[(triton.cdiv(len(rows), BLOCK),)](table, rows, token_ids, len(rows), BLOCK=BLOCK)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """[N, …] the rows of a dense table [R, …]."""
    out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype, device=table.device)
    _move(table, out, rows, scatter=False)
    return out


def scatter_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write dense `values` [N, …] to rows of a dense table [R, …]."""
    _move(table, values, rows, scatter=True)


def as_words(rows: Tensor) -> Tensor:
    """Dense rows [R, …] as [R, words] of the widest integers that divide a row and its address."""
    assert rows.is_contiguous(), f"rows of strides {rows.stride()}"
    flat = rows.view(len(rows), -1).view(torch.uint8)
    bytes_and_address = flat.shape[1] | flat.data_ptr()
    return flat.view(next(dtype for width, dtype in WORDS.items() if bytes_and_address % width == 0))


def _move(table: Tensor, values: Tensor, rows: Tensor, *, scatter: bool) -> None:
    if not values.numel():
        return
    assert table.shape[1:] == values.shape[1:], f"rows of {tuple(table.shape)} and {tuple(values.shape)}"
    assert table.dtype is values.dtype, f"rows of {table.dtype} and {values.dtype}"
    words, moved = as_words(table), as_words(values)
    if words.dtype is not moved.dtype:
        words, moved = words.view(torch.uint8), moved.view(torch.uint8)
    grid = (len(rows), triton.cdiv(words.shape[1], BLOCK))
    move_rows_kernel[grid](words, moved, rows, words.shape[1], SCATTER=scatter, BLOCK=BLOCK)
