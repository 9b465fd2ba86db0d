"""The kernel for single queries: softmax(q·Kᵀ)·V over pages where they lie, each query with a length of its own.

Nothing is gathered first. Under a sliding window a query has a first token too, and what lies before it is not read.

How a query is computed
    1. its tokens are cut into chunks of `CHUNK`; a (query, chunk) pair is a task, and tasks run in any order
    2. a task walks its pages tile by tile with an online softmax in float32 (`vector_rows`). A K or V row is loaded
       once for the query heads of its group, and all heads of a page are visited together: one long run of bytes
       comes from memory faster than the same bytes in pieces
    3. the chunks of a query are merged in order, weighted by their maxima

The cut depends on the query's own length and window alone, so its result is the same to the bit with any
number of threads and in any company.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.attention import cpu_kernels, phases, pieces, vector_rows, vector_softmax, vectors
from tandem_engine.attention.cpu_kernels import (
    CHUNK,
    FIRST,
    LENGTH,
    QUERY,
    QUERY_COLUMNS,
    ROW,
    STATISTICS,
    TASK_CHUNK,
    TOKEN,
    as_float32,
    cap_scores,
    merge_query,
    pair_up_queries,
)
from tandem_engine.attention.phases import PHASE_BYTES, array_at, finish, take, wait
from tandem_engine.attention.pieces import Array, compiled_callback, inlined
from tandem_engine.attention.vector_rows import build_row_pieces, by_pairs, fold, highest, weigh_row
from tandem_engine.attention.vectors import LANES
from tandem_engine.compiled import revision_of

types: Any = numba_types

TILE = 64
"""Tokens per softmax update, rounded up to whole pages."""
PHASES = 2
"""Of the kernel: attention, and the merging of its chunks."""

ATTEND = np.dtype(
    [
        (name, np.int64)
        for name in (
            "phases",
            "num_tasks",
            "tasks",
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
        )
    ]
    + [("scale", np.float32), ("soft_cap", np.float32)]
)
"""What the kernel is given, one record. Arrays are addresses:

    phases      [PHASES, PHASE_BYTES] zeros
    tasks       [num_tasks, 2] int64, columns `QUERY`, `TASK_CHUNK`
    queries     [num_queries, QUERY_COLUMNS] int64, columns `TOKEN` … `END_TASK`
    page_table  [num_rows, table_width] int32
    pages       [page, num_layers, 2, num_kv_heads, page_size, D] float32, or others as `cpu_numbers` has them
    q, out      [num_tokens, heads, D] float32; rows of `out` that are the queries' tokens are written
    partial     [num_tasks, heads, D + STATISTICS] float32, scratch

Each task is cut into `head_parts` by K/V heads: 1, or all of them. `soft_cap` is read by kernels that cap.
"""

PagedKernel = Any
"""A compiled callback of the address of an `ATTEND` record, for any number of threads."""
AttendTask = Callable[[Array, int, Array, np.float32, np.float32, Array, Array, int, int, Array, Array], None]


def revision(*, capped: bool) -> int:
    """Of what the kernel is made of."""
    parts = (pieces, cpu_kernels, phases, vectors, vector_softmax, vector_rows)
    return revision_of(*parts, constant=2 * (LANES + vectors.MULTIPLIES_PAIRS) + capped)


@cache
def build_paged_kernel(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> PagedKernel:
    """The kernel for pages of `dtype`, heads of `head_dim` and `group` query heads per K/V head.

    With `capped` a score s becomes soft_cap · tanh(s / soft_cap).
    """
    made_of, number = revision(capped=capped), numba.from_dtype(dtype)
    attend_task = build_attend_task(dtype, head_dim, group, capped=capped)

    def attend(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if made_of == 0:  # never: it is mentioned here to be closed over
            return
        heads = work.num_kv_heads * group
        pages = array_at(work.pages, (1, work.num_layers, 2, work.num_kv_heads, work.page_size, head_dim), number)
        page_table = array_at(work.page_table, (work.num_rows, work.table_width), types.int32)
        tasks = array_at(work.tasks, (work.num_tasks, 2), types.int64)
        queries = array_at(work.queries, (work.num_queries, QUERY_COLUMNS), types.int64)
        q = array_at(work.q, (work.num_tokens, heads, head_dim), types.float32)
        out = array_at(work.out, (work.num_tokens, heads, head_dim), types.float32)
        partial = array_at(work.partial, (work.num_tasks, heads, head_dim + STATISTICS), types.float32)
        count, heads_of_part = work.num_tasks * work.head_parts, work.num_kv_heads // work.head_parts
        part = take(work.phases)
        while part < count:
            task, first = part // work.head_parts, part % work.head_parts * heads_of_part
            attend_task(
                pages, work.layer, q, work.scale, work.soft_cap, page_table, tasks[task],
                first, first + heads_of_part, queries, partial[task],
            )  # fmt: skip
            finish(work.phases)
            part = take(work.phases)
        wait(work.phases, count)
        merging = work.phases + PHASE_BYTES
        index = take(merging)
        while index < work.num_queries:
            merge_query(queries[index], partial, out, head_dim)
            index = take(merging)

    return compiled_callback(attend, types.void(types.CPointer(numba.from_dtype(ATTEND))))


@cache
def build_attend_task(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> AttendTask:
    """A piece of kernels: partial [heads, D + STATISTICS] = a query's attention over one chunk of its tokens.

    Arguments are as in `ATTEND`: pages, layer, q, scale, soft_cap, page_table, a task, the first K/V head and the last
    exclusive, queries, the task's part of `partial`. No head depends on which others are computed with it.
    """
    multiply, add = build_row_pieces(dtype, head_dim, group)
    pairs = by_pairs(dtype)
    keys_lie_ready = pairs or dtype == np.float32
    values_lie_ready = dtype in (np.float32, np.uint16)

    def attend_task(
        pages: Array,
        layer: int,
        q: Array,
        scale: np.float32,
        soft_cap: np.float32,
        page_table: Array,
        task: Array,
        first_head: int,
        end_head: int,
        queries: Array,
        partial: Array,
    ) -> None:
        query = queries[task[QUERY]]
        begin = task[TASK_CHUNK] * CHUNK
        start, stop = max(begin, query[FIRST]), min(begin + CHUNK, query[LENGTH])
        page_row, page_size = page_table[query[ROW]], pages.shape[4]
        tile = (TILE + page_size - 1) // page_size * page_size
        room = (tile + LANES - 1) // LANES * LANES
        scores = np.empty((partial.shape[0], room), np.float32)
        sums = np.empty((group, room, LANES), np.float32)
        wide = np.empty((page_size, head_dim), np.uint32)
        decay = np.empty(room if capped else 0, np.float32)
        exponents = np.empty(room if capped else 0, np.int32)
        heads = q[query[TOKEN]]
        words = np.empty((partial.shape[0] if pairs else 0, head_dim // 2), np.uint32)
        if pairs:
            pair_up_queries(heads, words)
            heads_at, head_bytes = words.ctypes.data, words.strides[0]
        else:
            heads_at, head_bytes = heads.ctypes.data, heads.strides[0]
        first, last = first_head * group, end_head * group
        partial[first:last, :head_dim] = 0.0
        partial[first:last, head_dim] = -np.inf
        partial[first:last, head_dim + 1] = 0.0
        # A page may straddle two chunks: its slots before `start` belong to the chunk before.
        while start < stop:
            end = min(stop, start // page_size * page_size + tile)
            for kv_head in range(first_head, end_head):
                for index in range(start // page_size, (end + page_size - 1) // page_size):
                    slot, count = _slots(start, end, index, page_size)
                    rows = pages[page_row[index], layer, 0, kv_head, slot : slot + count]
                    keys = rows.ctypes.data if keys_lie_ready else as_float32(rows, wide).ctypes.data
                    at = sums[0, index * page_size + slot - start :].ctypes.data
                    multiply(heads_at + kv_head * group * head_bytes, keys, count, at, room)
                for head in range(group):
                    fold(sums[head].ctypes.data, end - start, scale, scores[kv_head * group + head].ctypes.data)
            for head in range(first, last):
                if capped:
                    cap_scores(scores[head], decay, exponents, end - start, soft_cap)
                _weigh(scores[head], end - start, partial[head], head_dim)
            for kv_head in range(first_head, end_head):
                outputs = partial[kv_head * group]
                for index in range(start // page_size, (end + page_size - 1) // page_size):
                    slot, count = _slots(start, end, index, page_size)
                    rows = pages[page_row[index], layer, 1, kv_head, slot : slot + count]
                    values = rows.ctypes.data if values_lie_ready else as_float32(rows, wide).ctypes.data
                    weights = scores[kv_head * group, index * page_size + slot - start :].ctypes.data
                    add(values, count, weights, room, outputs.ctypes.data, head_dim + STATISTICS)
            start = end

    return inlined(attend_task)  # type: ignore[no-any-return]


@inlined
def _slots(start: int, end: int, index: int, page_size: int) -> Any:
    """First slot and count of tokens [start, end) on a sequence's page of some index."""
    first = max(start - index * page_size, 0)
    return first, min(end - index * page_size, page_size) - first


@inlined
def _weigh(scores: Array, count: int, partial: Array, head_dim: int) -> None:
    """Turn scores into weights relative to the new maximum, and rescale what the old one weighted."""
    old = partial[head_dim]
    maximum = max(old, highest(scores.ctypes.data, count))
    total = weigh_row(scores.ctypes.data, count, maximum)
    if maximum > old:
        shrink = np.exp(old - maximum)
        for d in range(head_dim):
            partial[d] *= shrink
        partial[head_dim] = maximum
        partial[head_dim + 1] *= shrink
    partial[head_dim + 1] += total
