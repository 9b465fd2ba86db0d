"""The kernel for single queries: softmax(q·Kᵀ)·V over pages where they lie, each query with a length of its own.

Nothing is gathered first. Under a sliding window a query has a first token too, and what lies before it is not read.

How a query is computed
    1. its tokens are cut into chunks of `CHUNK`; a (query, chunk) pair is a task. Tasks that read the same pages are a
       group (`task_groups`), and groups are computed in any order
    2. a group walks its pages tile by tile with an online softmax in float32 (`paged_groups`). A K or V row is loaded
       once for the query heads of its group (`vector_rows`)
    3. the chunks of a query are merged in order, weighted by their maxima

The cut depends on the query's own length and window alone, and a task's result on nothing but the task. So a query's
result is the same to the bit with any number of threads and in any company.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.attention import (
    cpu_kernels,
    paged_groups,
    phases,
    pieces,
    task_groups,
    vector_rows,
    vector_softmax,
    vectors,
)
from tandem_engine.attention.cpu_kernels import QUERY_COLUMNS, STATISTICS, merge_query
from tandem_engine.attention.paged_groups import Work, build_attend_group, build_scratch
from tandem_engine.attention.phases import PHASE_BYTES, array_at, finish, take, wait
from tandem_engine.attention.pieces import compiled_callback
from tandem_engine.attention.task_groups import GROUP_COLUMNS
from tandem_engine.attention.vectors import LANES
from tandem_engine.compiled import revision_of

types: Any = numba_types

PHASES = 2
"""Of the kernel: attention, and the merging of its chunks."""
PIECES = (pieces, cpu_kernels, paged_groups, phases, task_groups, vectors, vector_softmax, vector_rows)
"""Modules that kernels over pages are made of."""

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
    pages       [page, num_layers, 2, num_kv_heads, page_size, D] float32, or others as `cpu_numbers` has them
    q, out      [num_tokens, heads, D] float32; rows of `out` that are the queries' tokens are written
    partial     [num_tasks, heads, D + STATISTICS] float32, scratch

Each group is cut into `head_parts` by K/V heads: 1, or all of them. `soft_cap` is read by kernels that cap.
"""

PagedKernel = Any
"""A compiled callback of the address of an `ATTEND` record, for any number of threads."""


def revision(*, capped: bool) -> int:
    """Of what the kernel is made of."""
    return revision_of(*PIECES, constant=2 * (LANES + vectors.MULTIPLIES_PAIRS) + capped)


@cache
def build_paged_kernel(dtype: np.dtype[Any], head_dim: int, group: int, *, capped: bool) -> PagedKernel:
    """The kernel for pages of `dtype`, heads of `head_dim` and `group` query heads per K/V head.

    With `capped` a score s becomes soft_cap · tanh(s / soft_cap).
    """
    made_of, number = revision(capped=capped), numba.from_dtype(dtype)
    attend_group = build_attend_group(dtype, head_dim, group, capped=capped)
    allocate = build_scratch(dtype, head_dim, group, capped=capped)

    def attend(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if made_of == 0:  # never: it is mentioned here to be closed over
            return
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
        merging = work.phases + PHASE_BYTES
        index = take(merging)
        while index < work.num_queries:
            merge_query(queries[index], partial, out, head_dim)
            index = take(merging)

    return compiled_callback(attend, types.void(types.CPointer(numba.from_dtype(ATTEND))))
