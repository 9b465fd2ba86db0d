"""Lists of work: every token of every row in exactly one item or tile, whatever the batch."""

import torch

from tandem_engine.kernels.span import Span
from tandem_engine.kernels.triton.work_list import (
    WHOLE,
    WINDOW,
    Bounds,
    Rows,
    Splitting,
    WorkList,
    list_constants,
    list_kernel,
)
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel

SPLITTING = Splitting(group=3, max_queries=2, min_split=16, max_splits=4, block_m=16)
LENS = ((1, 1), (2, 30), (1, 16), (5, 5), (1, 0), (1, 33), (40, 90), (2, 48), (1, 49), (1, 400), (3, 1000))


def lists(lens, span: Span | None, device: str) -> WorkList:
    queries, tokens = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*lens, strict=True))
    rows = Rows(torch.zeros((len(lens), 1), dtype=torch.int32, device=device), queries, tokens)
    bounds = Bounds(len(lens), max(tokens.tolist()), sum(queries.tolist()))
    work = WorkList.empty(SPLITTING, bounds, span=span, device=torch.device(device))
    work.fill(rows)
    return work


def splits(row: tuple[int, int], span: Span | None) -> int:
    """How many a row of few queries has, by their definition."""
    queries, tokens = row
    low = 0 if span is None else span.first_seen(max(tokens - queries, 0))
    length = SPLITTING.min_split * max(1, -(-(tokens - low) // (SPLITTING.min_split * (SPLITTING.max_splits - 1))))
    if tokens - low <= WHOLE * SPLITTING.min_split:
        length = WHOLE * SPLITTING.min_split
    return len({token // length for token in range(low, tokens)})


def check_every_row_is_listed_once(device: str) -> None:
    for span in (None, Span(1), Span(17), Span(100), Span(16, chunked=True), Span(70, chunked=True)):
        work = lists(LENS, span, device)
        few = [queries <= SPLITTING.max_queries for queries, _ in LENS]
        counts = [splits(row, span) if is_few else 0 for row, is_few in zip(LENS, few, strict=True)]
        assert max(counts) <= SPLITTING.max_splits
        items = [(row, split) for row, count in enumerate(counts) for split in range(count)]
        tiles = [
            (row, tile)
            for row, (queries, _) in enumerate(LENS)
            if not few[row]
            for tile in reversed(range(-(-queries * SPLITTING.group // SPLITTING.block_m)))
        ]
        assert work.totals.tolist() == [len(items), len(tiles)]
        packed = work.items[: len(items)].tolist()
        assert [(item // SPLITTING.max_splits, item % SPLITTING.max_splits) for item in packed] == items
        rows, numbers = (part[: len(tiles)].tolist() for part in (work.tile_rows, work.tile_numbers))
        assert list(zip(rows, numbers, strict=True)) == tiles
        assert work.first_items.tolist() == [sum(counts[:row]) for row in range(len(LENS))]
        assert work.starts.tolist() == [sum(queries for queries, _ in LENS[:row]) for row in range(len(LENS))]


def check_bounds_hold_in_the_worst_case(device: str) -> None:
    """Windows that begin within a split, and tiles of which each row has one that is nearly empty."""
    lens = [(1, 16 * 3 + offset) for offset in range(1, 16)] + [(6, 6)] * 4
    for span in (None, Span(16), Span(17), Span(33), Span(17, chunked=True)):
        work = lists(lens, span, device)
        items, tiles = work.totals.tolist()
        assert items <= len(work.items)
        assert tiles <= len(work.tile_rows)


def compile_lists(arch: int) -> None:
    pointers = ("starts", "first_items", "items", "tile_rows", "tile_numbers", "totals")
    signature = {
        **dict.fromkeys(("extend_lens", "seq_lens"), "*i32"),
        **dict.fromkeys(("num_rows", "span"), "i32"),
        **dict.fromkeys(pointers, "*i32:16"),
    }
    constants = list_constants(SPLITTING, 256, span=WINDOW, tiles=True)
    compile_kernel(list_kernel, signature, constants, arch=arch).assert_fits()
