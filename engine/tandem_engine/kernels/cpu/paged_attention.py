"""The attention kernel for single queries: softmax(q·Kᵀ)·V over pages in place, each query with its own length.

Nothing is gathered first. Under a sliding window a query also has a first token, and what is before it is not read.

    1. a query's tokens are cut into chunks of `CHUNK`; a (query, chunk) pair is a task. Tasks that read the same pages
       are a group (`attention_work`), and groups are computed in any order
    2. a group reads its pages tile by tile with an online softmax in float32: K of some heads times the queries,
       softmax so far, V on top of the outputs. A row is loaded once for the query heads of its group
       (`attention_rows`). Once the pages of its members differ, each member continues alone
    3. the chunks of a query are merged in order, weighted by their maxima

The cut depends only on the query's own length and window, and a task's result only on the task. So a query's result is
the same to the bit with any number of threads and in any batch.

Memory: while rows are being computed, the next ones are prefetched, because the processor itself reads ahead only
within 4 KiB, which is sixteen tokens of a head of 64 numbers. Pages that several members read come from memory once:
for each K/V head of a tile all members are computed in turn, first on K, then on V. A single member takes all heads of
a tile together, because one long run of bytes loads faster than the same bytes in pieces.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.kernels.cpu.attention_rows import build_row_pieces, by_pairs, fold, highest, weigh_row
from tandem_engine.kernels.cpu.attention_work import (
    CHUNK,
    END_MEMBER,
    FIRST,
    FIRST_MEMBER,
    GROUP_COLUMNS,
    LENGTH,
    MAX_GROUP,
    QUERY,
    QUERY_COLUMNS,
    ROW,
    SHARED_END,
    STATISTICS,
    TASK_CHUNK,
    TOKEN,
    as_float32,
    cap_scores,
    merge_query,
    pages_of_tile,
    pair_up_queries,
)
from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.pieces import Array, compiled_callback, inlined
from tandem_engine.kernels.cpu.threads import PHASE_BYTES, array_at, finish, take, wait
from tandem_engine.kernels.cpu.vectors import FLOAT_BYTES, LANES


class Work(NamedTuple):
    """What all groups have in common, as `paged_attention.ATTEND` has it."""

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
    """[MAX_GROUP, heads, D / 2] uint32: queries by pairs, where pairs are multiplied"""
    scores: Array
    """[MAX_GROUP, heads, room]"""
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
            words=np.empty((MAX_GROUP, heads if pairs else 0, head_dim // 2), np.uint32),
            scores=np.empty((MAX_GROUP, heads, room), np.float32),
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


types: Any = numba_types

PHASES = 2
"""Of the kernel: attention, and the merging of its chunks."""

ATTEND = np.dtype(
    [
        (name, np.int64)
        for name in (
            "phases",
            "num_tasks",
            "tasks",
            "num_groups",
            "groups",
            "members",
            "num_queries",
            "queries",
            "head_parts",
            "num_rows",
            "table_width",
            "page_table",
            "pages",
            "num_layers",
            "layer",
            "num_kv_heads",
            "page_size",
            "num_tokens",
            "q",
            "partial",
            "out",
            "sinks",
        )
    ]
    + [("scale", np.float32), ("soft_cap", np.float32)]
)
"""What the kernel is given, one record. Arrays are addresses:

    phases      [PHASES, PHASE_BYTES] zeros
    tasks       [num_tasks, 2] int64, columns `QUERY`, `TASK_CHUNK`
    groups      [num_groups, GROUP_COLUMNS] int64, columns `FIRST_MEMBER` … `SHARED_END`
    members     [num_tasks] int64, indices of tasks
    queries     [num_queries, QUERY_COLUMNS] int64, columns `TOKEN` … `END_TASK`
    page_table  [num_rows, table_width] int32
    pages       [page, num_layers, 2, num_kv_heads, page_size, D] float32, or others as `numbers` has them
    q, out      [num_tokens, heads, D] float32; rows of `out` that are the queries' tokens are written
    partial     [num_tasks, heads, D + STATISTICS] float32, scratch
    sinks       [heads] float32, or 0 for a layer without sinks

Each group is cut into `head_parts` by K/V heads: 1, or all of them. `soft_cap` is read by kernels that cap.
"""

PagedKernel = Any
"""A compiled callback of the address of an `ATTEND` record, for any number of threads."""


@kept
def build_paged_kernel(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> PagedKernel:
    """The kernel for pages of `dtype`, heads of `head_dim` and `group` query heads per K/V head.

    With `capped` a score s becomes soft_cap · tanh(s / soft_cap).
    """
    number = numba.from_dtype(dtype)
    attend_group = build_attend_group(dtype, head_dim, group, capped=capped)
    allocate = build_scratch(dtype, head_dim, group, capped=capped)

    def attend(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        heads = work.num_kv_heads * group
        partial = array_at(work.partial, (work.num_tasks, heads, head_dim + STATISTICS), types.float32)
        queries = array_at(work.queries, (work.num_queries, QUERY_COLUMNS), types.int64)
        groups = array_at(work.groups, (work.num_groups, GROUP_COLUMNS), types.int64)
        step = Work(
            pages=array_at(work.pages, (1, work.num_layers, 2, work.num_kv_heads, work.page_size, head_dim), number),
            layer=work.layer,
            page_table=array_at(work.page_table, (work.num_rows, work.table_width), types.int32),
            queries=queries,
            tasks=array_at(work.tasks, (work.num_tasks, 2), types.int64),
            members=array_at(work.members, (work.num_tasks,), types.int64),
            q=array_at(work.q, (work.num_tokens, heads, head_dim), types.float32),
            partial=partial,
            scale=work.scale,
            soft_cap=work.soft_cap,
        )
        count, heads_of_part = work.num_groups * work.head_parts, work.num_kv_heads // work.head_parts
        scratch = allocate(step)
        part = take(work.phases)
        while part < count:
            first = part % work.head_parts * heads_of_part
            attend_group(step, scratch, groups[part // work.head_parts], first, first + heads_of_part)
            finish(work.phases)
            part = take(work.phases)
        wait(work.phases, count)
        out = array_at(work.out, (work.num_tokens, heads, head_dim), types.float32)
        sinks = array_at(work.sinks, (heads if work.sinks != 0 else 0,), types.float32)
        merging = work.phases + PHASE_BYTES
        index = take(merging)
        while index < work.num_queries:
            merge_query(queries[index], partial, out, head_dim, sinks)
            index = take(merging)

    return compiled_callback(attend, types.void(types.CPointer(numba.from_dtype(ATTEND))))
