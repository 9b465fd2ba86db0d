"""Queries over the pages of one chunk: what kernels that read pages in place are made of.

    tile    K of some heads times the queries, softmax so far, V on top of the outputs
    group   tile after tile for all of its members, while they read the same pages; then each of them alone

While rows are computed with, those that come next are fetched: the processor itself reads ahead within 4 KiB only, and
sixteen tokens of a head of 64 numbers are as long as that.

Pages that several members read come from memory once: for each K/V head of a tile all members take their turn, first at
K, then at V. Alone, all heads of a tile are visited together, for one long run of bytes comes from memory faster than
the same bytes in pieces.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tandem_engine.attention.cpu_kernels import (
    CHUNK,
    FIRST,
    LENGTH,
    QUERY,
    ROW,
    STATISTICS,
    TASK_CHUNK,
    TOKEN,
    as_float32,
    cap_scores,
    pages_of_tile,
    pair_up_queries,
)
from tandem_engine.attention.pieces import Array, inlined
from tandem_engine.attention.task_groups import END_MEMBER, FIRST_MEMBER, LARGEST_GROUP, SHARED_END
from tandem_engine.attention.vector_rows import build_row_pieces, by_pairs, fold, highest, weigh_row
from tandem_engine.attention.vectors import FLOAT_BYTES, LANES


class Work(NamedTuple):
    """What all groups have in common, as `paged_kernel.ATTEND` has it."""

    pages: Array
    layer: int
    page_table: Array
    queries: Array
    tasks: Array
    members: Array
    q: Array
    partial: Array
    scale: np.float32
    soft_cap: np.float32


class Scratch(NamedTuple):
    """Of a thread."""

    words: Array
    """[LARGEST_GROUP, heads, D / 2] uint32: queries by pairs, where pairs are multiplied"""
    scores: Array
    """[LARGEST_GROUP, heads, room]"""
    sums: Array
    """[group, room, LANES]"""
    wide: Array
    """[page_size, D] uint32, numbers being widened"""
    decay: Array
    """[room], where scores are capped"""
    exponents: Array
    """[room] int32, the same"""


AllocateScratch = Callable[[Work], Scratch]
AttendGroup = Callable[[Work, Scratch, Array, int, int], None]
WeighTile = Callable[[Work, Scratch, int, int, int, int, int, int], None]
AddTile = Callable[[Work, Scratch, int, int, int, int, int, int, int], None]


@cache
def build_scratch(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> AllocateScratch:
    """A piece of kernels: what a thread works on."""
    pairs = by_pairs(dtype)

    def allocate(work: Work) -> Scratch:
        page_size, heads = work.pages.shape[4], work.partial.shape[1]
        room = (pages_of_tile(page_size) * page_size + LANES - 1) // LANES * LANES
        return Scratch(
            words=np.empty((LARGEST_GROUP, heads if pairs else 0, head_dim // 2), np.uint32),
            scores=np.empty((LARGEST_GROUP, heads, room), np.float32),
            sums=np.empty((group, room, LANES), np.float32),
            wide=np.empty((page_size, head_dim), np.uint32),
            decay=np.empty(room if capped else 0, np.float32),
            exponents=np.empty(room if capped else 0, np.int32),
        )

    return inlined(allocate)  # type: ignore[no-any-return]


@cache
def build_attend_group(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> AttendGroup:
    """A piece of kernels: `partial` [heads, D + STATISTICS] of the tasks of a group, for a range of K/V heads.

    Arguments: the work, scratch, a row of `groups`, the first K/V head and the last, exclusive. No head depends on
    which others are computed with it, and no task on the others of its group.
    """
    weigh_tile = _build_weigh_tile(dtype, head_dim, group, capped=capped)
    add_tile = _build_add_tile(dtype, head_dim, group)
    pairs = by_pairs(dtype)

    def attend_group(work: Work, scratch: Scratch, row: Array, first_head: int, end_head: int) -> None:
        first, count, page_size = row[FIRST_MEMBER], row[END_MEMBER] - row[FIRST_MEMBER], work.pages.shape[4]
        for member in range(count):
            task = work.members[first + member]
            if pairs:
                pair_up_queries(work.q[work.queries[work.tasks[task, QUERY], TOKEN]], scratch.words[member])
            for head in range(first_head * group, end_head * group):
                work.partial[task, head, :head_dim] = 0.0
                work.partial[task, head, head_dim] = -np.inf
                work.partial[task, head, head_dim + 1] = 0.0
        begin = work.tasks[work.members[first], TASK_CHUNK] * CHUNK
        for turn in range(0 if count > 1 else 1, count + 1):
            together = turn == 0
            first_member = 0 if together else turn - 1
            end_member = count if together else turn
            query = work.queries[work.tasks[work.members[first + first_member], QUERY]]
            start = begin if together else max(begin, query[FIRST], row[SHARED_END])
            stop = row[SHARED_END] if together else min(begin + CHUNK, query[LENGTH])
            heads_at_once = 1 if together else end_head - first_head
            # A page may straddle two chunks: its slots before `start` belong to the chunk before.
            while start < stop:
                end = min(stop, (start // page_size + pages_of_tile(page_size)) * page_size)
                for head in range(first_head, end_head, heads_at_once):
                    for member in range(first_member, end_member):
                        task = work.members[first + member]
                        weigh_tile(work, scratch, task, member, start, end, head, head + heads_at_once)
                    for member in range(first_member, end_member):
                        task = work.members[first + member]
                        add_tile(work, scratch, task, member, start, end, stop, head, head + heads_at_once)
                start = end

    return inlined(attend_group)  # type: ignore[no-any-return]


def _build_weigh_tile(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> WeighTile:
    """K times a task's query, which is member number `member`, and the softmax so far: `scores` become weights.

    Of tokens [start, end) of the sequence and of some K/V heads.
    """
    multiply, _ = build_row_pieces(dtype, head_dim, group)
    pairs = by_pairs(dtype)
    lie_ready = pairs or dtype == np.float32
    query_bytes = head_dim * (dtype.itemsize if pairs else FLOAT_BYTES)

    def weigh_tile(
        work: Work, scratch: Scratch, task: int, member: int, start: int, end: int, first_head: int, end_head: int
    ) -> None:
        pages, layer, page_size = work.pages, work.layer, work.pages.shape[4]
        query = work.queries[work.tasks[task, QUERY]]
        page_row = work.page_table[query[ROW]]
        queries_at = scratch.words[member].ctypes.data if pairs else work.q[query[TOKEN]].ctypes.data
        # Addresses, for numba counts references to whatever part of an array it looks at.
        sums_at, room = scratch.sums.ctypes.data, scratch.sums.shape[1]
        scores_at = scratch.scores[member].ctypes.data
        for kv_head in range(first_head, end_head):
            for index in range(start // page_size, (end + page_size - 1) // page_size):
                slot, count = _slots(start, end, index, page_size)
                rows = pages[page_row[index], layer, 0, kv_head, slot : slot + count]
                keys = rows.ctypes.data if lie_ready else as_float32(rows, scratch.wide).ctypes.data
                at = sums_at + (index * page_size + slot - start) * LANES * FLOAT_BYTES
                ahead = rows.ctypes.data + pages.strides[2]  # V of the same tokens
                multiply(queries_at + kv_head * group * query_bytes, keys, count, at, room, ahead)
            for head in range(group):
                at = scores_at + (kv_head * group + head) * room * FLOAT_BYTES
                fold(sums_at + head * room * LANES * FLOAT_BYTES, end - start, work.scale, at)
        for head in range(first_head * group, end_head * group):
            if capped:
                scores = scratch.scores[member, head]
                cap_scores(scores, scratch.decay, scratch.exponents, end - start, work.soft_cap)
            _weigh(scores_at + head * room * FLOAT_BYTES, end - start, work.partial[task, head], head_dim)

    return inlined(weigh_tile)  # type: ignore[no-any-return]


def _build_add_tile(dtype: np.dtype[Any], head_dim: int, group: int) -> AddTile:
    """V of the same tile, by its weights, on top of the outputs. `stop` is where the last tile ends."""
    _, add = build_row_pieces(dtype, head_dim, group)
    lie_ready = dtype in (np.float32, np.uint16)

    def add_tile(
        work: Work,
        scratch: Scratch,
        task: int,
        member: int,
        start: int,
        end: int,
        stop: int,
        first_head: int,
        end_head: int,
    ) -> None:
        pages, layer, page_size = work.pages, work.layer, work.pages.shape[4]
        page_row = work.page_table[work.queries[work.tasks[task, QUERY], ROW]]
        weights_at, room = scratch.scores[member].ctypes.data, scratch.scores.shape[2]
        for kv_head in range(first_head, end_head):
            outputs = work.partial[task, kv_head * group :].ctypes.data
            for index in range(start // page_size, (end + page_size - 1) // page_size):
                slot, count = _slots(start, end, index, page_size)
                rows = pages[page_row[index], layer, 1, kv_head, slot : slot + count]
                values = rows.ctypes.data if lie_ready else as_float32(rows, scratch.wide).ctypes.data
                at = weights_at + (kv_head * group * room + index * page_size + slot - start) * FLOAT_BYTES
                # K of the next tile, or where there is none anything.
                after = index + pages_of_tile(page_size)
                ahead = pages[page_row[after if after * page_size < stop else index], layer, 0, kv_head].ctypes.data
                add(values, count, at, room, outputs, head_dim + STATISTICS, ahead)

    return inlined(add_tile)  # type: ignore[no-any-return]


@inlined
def _slots(start: int, end: int, index: int, page_size: int) -> Any:
    """First slot and count of tokens [start, end) on a sequence's page of some index."""
    first = max(start - index * page_size, 0)
    return first, min(end - index * page_size, page_size) - first


@inlined
def _weigh(scores: int, count: int, partial: Array, head_dim: int) -> None:
    """Turn scores, at an address, into weights relative to the new maximum, and rescale what the old one weighted."""
    old = partial[head_dim]
    maximum = max(old, highest(scores, count))
    total = weigh_row(scores, count, maximum)
    if maximum > old:
        shrink = np.exp(old - maximum)
        for d in range(head_dim):
            partial[d] *= shrink
        partial[head_dim] = maximum
        partial[head_dim + 1] *= shrink
    partial[head_dim + 1] += total
