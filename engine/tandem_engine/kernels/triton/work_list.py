"""Which program computes what: a ragged batch as a list of equal pieces of work, made on the device.

Lengths need not be known on the host, and a list in fixed memory is all that a CUDA graph needs to run for any batch.

    a row of few queries    decode   its visible tokens in splits, one item each       items: row · MAX_SPLITS + split
    any other row           extend   its queries in tiles of BLOCK_M rows, last first  tiles: row, number

Which way a row goes, and how it is split, follow from the row alone: so does its result, to the bit. Splits begin at
multiples of their length, so a token falls into the same split whether it is seen by one query or by several:

    split length = MIN_SPLIT · ⌈visible tokens / (MIN_SPLIT · (MAX_SPLITS − 1))⌉
                   WHOLE · MIN_SPLIT for that many tokens or fewer

which makes at most MAX_SPLITS of them, wherever a window begins. A short row is whole, since a second split costs
more than it saves: partial results, and a launch that has something to combine (256 rows of 540 tokens on an H200: 153
us instead of 197).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.span import Span

MIN_WIDTH = 1024
"""So many rows take one kernel, however few they are."""

WHOLE = 4
"""A row of at most so many shortest splits is one split."""

_WHOLE = tl.constexpr(WHOLE)

MAX_ROWS = 64
"""Of a tile of decode, whose registers also hold as many rows of results."""


ALL, WINDOW, CHUNKS = range(3)
"""What kernels are compiled for: the value of SPAN."""

_CHUNKS = tl.constexpr(CHUNKS)


def span_constant(span: Span | None) -> int:
    """The SPAN of `span`."""
    if span is None:
        return ALL
    return CHUNKS if span.chunked else WINDOW


@triton.jit
def first_seen(end, span, SPAN: tl.constexpr):
    """The first token that the one before `end` sees, in a window or chunks of `span`. It may be negative."""
    return (end - 1) // span * span if SPAN == _CHUNKS else end - span


@triton.jit
def visible_splits(q_len, seq_len, span, SPAN: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Of rows with `q_len` queries at the end of `seq_len` tokens: first visible token, split length, and how many."""
    low = seq_len * 0
    if SPAN:
        low = tl.maximum(first_seen(seq_len - q_len + 1, span, SPAN), 0)
    length = MIN_SPLIT * tl.maximum(tl.cdiv(seq_len - low, MIN_SPLIT * (MAX_SPLITS - 1)), 1)
    length = tl.where(seq_len - low <= _WHOLE * MIN_SPLIT, _WHOLE * MIN_SPLIT, length)
    return low, length, tl.cdiv(seq_len, length) - low // length


@triton.jit(do_not_specialize=["num_rows", "span"], do_not_specialize_on_alignment=["extend_lens", "seq_lens"])
def list_kernel(
    extend_lens,
    seq_lens,
    num_rows,
    span,
    starts,
    first_items,
    items,
    tile_rows,
    tile_numbers,
    totals,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    SPAN: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Row i writes its share of the lists; program i. WIDTH: num_rows or a power of two above. BLOCK_M 0: no tiles.

    A row whose number of queries is negative has so many, but no work.
    """
    row = tl.program_id(0)
    rows = tl.arange(0, WIDTH)
    given = tl.load(extend_lens + rows, mask=rows < num_rows, other=0)
    q_len = tl.abs(given)
    seq_len = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    few = q_len <= MAX_QUERIES
    _, _, splits = visible_splits(q_len, seq_len, span, SPAN, MIN_SPLIT, MAX_SPLITS)
    splits = tl.where(few & (given > 0), splits, 0)
    before, here = rows < row, rows == row
    tl.store(starts + row, tl.sum(tl.where(before, q_len, 0)))
    first = tl.sum(tl.where(before, splits, 0))
    tl.store(first_items + row, first)
    split = tl.arange(0, MAX_SPLITS)
    tl.store(items + first + split, row * MAX_SPLITS + split, mask=split < tl.sum(tl.where(here, splits, 0)))
    if row == 0:
        tl.store(totals, tl.sum(splits))
    if BLOCK_M > 0:
        tiles = tl.where(few | (given < 0), 0, tl.cdiv(q_len * GROUP, BLOCK_M))
        first = tl.sum(tl.where(before, tiles, 0))
        count = tl.sum(tl.where(here, tiles, 0))
        for start in range(0, count, 64):
            tile = start + tl.arange(0, 64)
            tl.store(tile_rows + first + tile, tile * 0 + row, mask=tile < count)
            tl.store(tile_numbers + first + tile, count - 1 - tile, mask=tile < count)
        if row == 0:
            tl.store(totals + 1, tl.sum(tiles))


@dataclass(frozen=True, kw_only=True, slots=True)
class Splitting:
    """How the rows of an engine are divided, whatever the batch."""

    group: int
    """Query heads of a K/V head."""
    max_queries: int
    """Rows with more go to extend."""
    min_split: int
    max_splits: int
    """A power of two."""
    block_m: int
    """Query rows of a tile of extend: tokens times `group`."""

    def items(self, bounds: "Bounds") -> int:
        """How many there can be. One more than whole splits, for a window may begin within one."""
        return bounds.rows * min(self.max_splits, -(-bounds.longest // self.min_split) + 1)

    def tiles(self, bounds: "Bounds") -> int:
        """How many there can be: each row with tiles may have one that is not full."""
        if not bounds.extend_tokens:
            return 0
        rows = bounds.rows if bounds.extends is None else bounds.extends
        return -(-bounds.extend_tokens * self.group // self.block_m) + rows


class Bounds(NamedTuple):
    """What is known of a batch without its lengths."""

    rows: int
    longest: int
    """Tokens of a row, at most."""
    extend_tokens: int
    """Queries of rows that may have more than `max_queries`; 0 if none has."""
    extends: int | None = None
    """Rows of more than one query, at most; None: perhaps all."""


def splitting_of(*, num_heads: int, kv_heads: int, max_queries: int, block_m: int) -> Splitting:
    """The fewer K/V heads, the more splits: one long sequence should be work for some 250 programs.

    4k tokens of 8 heads are 128 items; from 8k on all of the 256 that 32 splits allow. `max_queries` is what is wanted
    for: a tile of decode has at most `MAX_ROWS` rows, unless one query has more heads.
    """
    group = num_heads // kv_heads
    max_splits = min(max(256 // triton.next_power_of_2(kv_heads), 16), 128)
    return Splitting(
        group=group,
        max_queries=max(1, min(max_queries, MAX_ROWS // group)),
        min_split=256 if kv_heads >= 4 else 128,
        max_splits=max_splits,
        block_m=block_m,
    )


class Rows(NamedTuple):
    """The rows of a batch, on the device."""

    page_table: Tensor
    """[B, pages] int32, as the others."""
    extend_lens: Tensor
    """[B] queries, which are the last tokens of the row."""
    seq_lens: Tensor
    """[B] tokens with K and V in the pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkList:
    """The lists of one batch for layers of one span. int32 on the device."""

    splitting: Splitting
    span: Span | None
    starts: Tensor
    """[B] tokens before each row."""
    first_items: Tensor
    """[B] items before those of each row."""
    items: Tensor
    """[items]"""
    tile_rows: Tensor
    tile_numbers: Tensor
    """[tiles]"""
    totals: Tensor
    """[2] how many items and tiles there are."""

    @property
    def has_tiles(self) -> bool:
        return len(self.tile_rows) > 0

    @property
    def length(self) -> int:
        """Tokens of the window or of a chunk, as kernels take it."""
        return 0 if self.span is None else self.span.tokens

    @classmethod
    def empty(cls, splitting: Splitting, bounds: Bounds, *, span: Span | None, device: torch.device) -> "WorkList":
        """Memory for the lists of any batch within `bounds`."""

        def numbers(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return cls(
            splitting=splitting,
            span=span,
            starts=numbers(bounds.rows),
            first_items=numbers(bounds.rows),
            items=numbers(splitting.items(bounds)),
            tile_rows=numbers(splitting.tiles(bounds)),
            tile_numbers=numbers(splitting.tiles(bounds)),
            totals=numbers(2),
        )

    def fill(self, rows: Rows) -> None:
        """Write the lists of `rows`. A row of no tokens has no work."""
        count = len(self.starts)
        assert len(rows.seq_lens) == count, f"{len(rows.seq_lens)} rows for lists of {count}"
        list_kernel[(count,)](
            rows.extend_lens, rows.seq_lens, count, self.length,
            self.starts, self.first_items, self.items, self.tile_rows, self.tile_numbers, self.totals,
            **self.constants(),
        )  # fmt: skip

    def constants(self) -> dict[str, int | bool]:
        """What the kernel is compiled for."""
        return list_constants(self.splitting, len(self.starts), span=span_constant(self.span), tiles=self.has_tiles)


def list_constants(splitting: Splitting, rows: int, *, span: int, tiles: bool) -> dict[str, int | bool]:
    """What `list_kernel` is compiled for."""
    return {
        "GROUP": splitting.group,
        "MAX_QUERIES": splitting.max_queries,
        "SPAN": span,
        "MIN_SPLIT": splitting.min_split,
        "MAX_SPLITS": splitting.max_splits,
        "BLOCK_M": splitting.block_m if tiles else 0,
        "WIDTH": max(MIN_WIDTH, triton.next_power_of_2(rows)),
    }
