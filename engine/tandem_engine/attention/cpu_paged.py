"""Queries that read K and V where they lie: which ones a step has, and the call that computes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention import cpu_kernels
from tandem_engine.attention.cpu_kernels import LENGTH, QUERY_COLUMNS, STATISTICS, pages_of_tile
from tandem_engine.attention.cpu_numbers import as_array
from tandem_engine.attention.cpu_queries import NO_WINDOW, cut_queries
from tandem_engine.attention.paged_kernel import ATTEND, PHASES, PagedKernel, build_paged_kernel
from tandem_engine.attention.phases import PHASE_BYTES
from tandem_engine.attention.pieces import Array
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.attention.task_groups import group_tasks
from tandem_engine.attention.team import team
from tandem_engine.errors import ConfigError
from tandem_engine.forward.borrowed import borrowed
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.kernels.float8 import FLOAT8
from tandem_engine.memory.pool import KvPool

PARALLEL_BYTES = 1 << 18
"""K and V bytes of one layer from which other threads, some 5 µs away, pay."""
TASKS_PER_THREAD = 2
"""So many at least, where heads can be told apart."""


class Query(NamedTuple):
    """One token that attends to tokens [first, length) of the sequence in `row` of the page table."""

    token: int
    row: int
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedQueries:
    """The paged kernel's share of a step; arrays as `paged_kernel.ATTEND` describes them."""

    queries: Array
    tasks: Array
    groups: Array
    members: Array
    page_table: Array
    rows_read: int
    """K/V rows per head that all queries read together."""


def plan_paged(
    batch: ForwardBatch, *, short: Sequence[Query], first_decode: int, window: int | None, page_size: int
) -> PagedQueries:
    """`short` queries, then one for every DECODE sequence of `batch`, whose tokens start at `first_decode`.

    `window` bounds the decodes; `short` queries carry their own bounds.
    """
    queries = np.empty((len(short) + batch.num_sequences - batch.num_extend, QUERY_COLUMNS), np.int64)
    if short:
        queries[: len(short), : LENGTH + 1] = short
    bound = NO_WINDOW if window is None else window
    tasks, rows_read = cut_queries(queries, len(short), borrowed(batch.seq_lens), batch.num_extend, first_decode, bound)
    table = batch.page_table.numpy()
    groups, members = _grouped(tasks, queries, table, page_size)
    return PagedQueries(
        queries=queries, tasks=tasks, groups=groups, members=members, page_table=table, rows_read=rows_read
    )


def _grouped(tasks: Array, queries: Array, page_table: Array, page_size: int) -> tuple[Array, Array]:
    tile, threads = pages_of_tile(page_size) * page_size, torch.get_num_threads()
    groups, members = group_tasks(tasks, queries, page_table, page_size, tile, threads)
    return groups, members


class PagedKernels:
    """The compiled kernels that `specs` need, bound to a pool of float32, bfloat16 or float8 pages in host memory."""

    def __init__(self, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        if pool.data.dtype not in {torch.float32, torch.bfloat16} | FLOAT8:
            raise ConfigError(f"attention on a CPU reads KV of float32, bfloat16 or fp8, got {pool.data.dtype}")
        self._dtype, self._converted = pool.data.dtype, pool.converted
        self.pages = as_array(pool.data)
        """[page, layer, 2, KV, slot, D]; bfloat16 as uint16, float8 as uint8 (e4m3) and int8 (e5m2)."""
        _, _, _, kv_heads, _, self._head_dim = pool.data.shape
        self._row_bytes = 2 * kv_heads * self._head_dim * self._dtype.itemsize
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._capped = frozenset(spec.soft_cap is not None for spec in specs)

    def warm_up(self) -> None:
        """Compile, by calls with nothing to do."""
        row = torch.empty((0, self._kv_heads, self._head_dim))
        self.store(0, row, row, np.empty(0, np.int64))
        queries = np.empty((0, QUERY_COLUMNS), np.int64)
        tasks, _ = cut_queries(queries, 0, np.empty(0, np.int64), 0, 0, NO_WINDOW)
        _grouped(tasks, queries, np.empty((0, 1), np.int32), self.pages.shape[4])
        for capped in self._capped:
            self._kernel(capped=capped)

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Array) -> None:
        """Write k and v [T, kv_heads, head_dim], any float dtype, to int64 slots [T] of one layer."""
        keys, values = (as_array(rows.contiguous()) for rows in self._converted(layer, k, v))
        cpu_kernels.store(self.pages, layer, keys, values, slots)

    def attend(self, layer: int, q: Tensor, work: PagedQueries, spec: AttentionSpec, out: Tensor) -> None:
        """q [T, heads, head_dim] to the rows of `out`, of that shape, that are the queries' tokens.

        Both are dense float32. `work` was planned with the window of `spec`.
        """
        threads = torch.get_num_threads() if work.rows_read * self._row_bytes >= PARALLEL_BYTES else 1
        partial = np.empty((len(work.tasks), q.shape[1], self._head_dim + STATISTICS), np.float32)
        shared = np.zeros((PHASES, PHASE_BYTES), np.uint8)
        data = np.zeros(1, ATTEND)
        record = data[0]
        record["num_tasks"], record["num_groups"] = len(work.tasks), len(work.groups)
        record["num_queries"] = len(work.queries)
        record["num_rows"], record["table_width"] = work.page_table.shape
        _, record["num_layers"], _, record["num_kv_heads"], record["page_size"], _ = self.pages.shape
        record["layer"], record["num_tokens"] = layer, len(q)
        few = threads > 1 and len(work.groups) < TASKS_PER_THREAD * threads
        record["head_parts"] = self._kv_heads if few else 1
        record["scale"], record["soft_cap"] = spec.scale, spec.soft_cap or 0.0
        record["q"], record["out"] = q.data_ptr(), out.data_ptr()
        arrays = {
            "phases": shared,
            "tasks": work.tasks,
            "groups": work.groups,
            "members": work.members,
            "queries": work.queries,
            "page_table": work.page_table,
            "pages": self.pages,
            "partial": partial,
        }
        for name, array in arrays.items():
            record[name] = array.ctypes.data
        team().run(self._kernel(capped=spec.soft_cap is not None).address, data.ctypes.data, threads)

    def _kernel(self, *, capped: bool) -> PagedKernel:
        group = self._num_heads // self._kv_heads
        return build_paged_kernel(self.pages.dtype, self._head_dim, group, capped=capped)
