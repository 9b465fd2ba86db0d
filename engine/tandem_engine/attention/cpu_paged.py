"""Queries that read K and V where they lie: which ones a step has, and the choice of threads to run them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention import cpu_kernels
from tandem_engine.attention.cpu_kernels import (
    LENGTH,
    QUERY_COLUMNS,
    STATISTICS,
    Array,
    AttendKernel,
)
from tandem_engine.attention.cpu_numbers import as_array
from tandem_engine.attention.cpu_queries import NO_WINDOW, cut_queries
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.errors import ConfigError
from tandem_engine.forward.borrowed import borrowed
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.kernels.float8 import FLOAT8
from tandem_engine.memory.pool import KvPool

PARALLEL_BYTES = 2 * 1024 * 1024
"""K and V bytes of one layer from which waking other threads, some 40 µs, pays (ADR 0002)."""

# numba has one thread pool per process and aborts the process when two threads enter it. Whoever finds it
# taken computes alone, to the same bits.
_thread_pool = threading.Lock()


class Query(NamedTuple):
    """One token that attends to tokens [first, length) of the sequence in `row` of the page table."""

    token: int
    row: int
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedQueries:
    """The paged kernel's share of a step; arrays as `cpu_kernels.build_attend_serial` describes them."""

    queries: Array
    tasks: Array
    page_table: Array
    rows_read: int
    """K/V rows per head that all queries read together."""


def plan_paged(batch: ForwardBatch, *, short: Sequence[Query], first_decode: int, window: int | None) -> PagedQueries:
    """`short` queries, then one for every DECODE sequence of `batch`, whose tokens start at `first_decode`.

    `window` bounds the decodes; `short` queries carry their own bounds.
    """
    queries = np.empty((len(short) + batch.num_sequences - batch.num_extend, QUERY_COLUMNS), np.int64)
    if short:
        queries[: len(short), : LENGTH + 1] = short
    bound = NO_WINDOW if window is None else window
    tasks, rows_read = cut_queries(queries, len(short), borrowed(batch.seq_lens), batch.num_extend, first_decode, bound)
    return PagedQueries(queries=queries, tasks=tasks, page_table=batch.page_table.numpy(), rows_read=rows_read)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPair:
    """The same kernel twice: on the calling thread, and on all of them."""

    serial: AttendKernel
    parallel: AttendKernel

    @classmethod
    def build(cls, head_dim: int, group: int, *, capped: bool) -> "KernelPair":
        return cls(
            serial=cpu_kernels.build_attend_serial(head_dim, group, capped=capped),
            parallel=cpu_kernels.build_attend_parallel(head_dim, group, capped=capped),
        )


class PagedKernels:
    """The compiled kernels that `specs` need, bound to a pool of float32, bfloat16 or float8 pages in host memory."""

    def __init__(self, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        if pool.data.dtype not in {torch.float32, torch.bfloat16} | FLOAT8:
            raise ConfigError(f"attention on a CPU reads KV of float32, bfloat16 or fp8, got {pool.data.dtype}")
        # Threads that sleep when idle: those of OpenMP spin, beside torch's own spinning ones (ADR 0002).
        if numba.config.THREADING_LAYER == "default":
            numba.config.THREADING_LAYER = "workqueue"
        self._dtype, self._converted = pool.data.dtype, pool.converted
        self.pages = as_array(pool.data)
        """[page, layer, 2, KV, slot, D]; bfloat16 as uint16, float8 as uint8 (e4m3) and int8 (e5m2)."""
        _, _, _, kv_heads, _, self._head_dim = pool.data.shape
        self._row_bytes = 2 * kv_heads * self._head_dim * self._dtype.itemsize
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._pairs = {
            capped: KernelPair.build(self._head_dim, num_heads // kv_heads, capped=capped)
            for capped in {spec.soft_cap is not None for spec in specs}
        }

    def warm_up(self) -> None:
        """Compile, by calls with nothing to do."""
        row = torch.empty((0, self._kv_heads, self._head_dim))
        self.store(0, row, row, np.empty(0, np.int64))
        nothing = PagedQueries(
            queries=np.empty((0, QUERY_COLUMNS), np.int64),
            tasks=np.empty((0, 2), np.int64),
            page_table=np.empty((0, 1), np.int32),
            rows_read=0,
        )
        cut_queries(nothing.queries, 0, np.empty(0, np.int64), 0, 0, NO_WINDOW)
        q, spec = torch.empty((0, self._num_heads, self._head_dim)), AttentionSpec(scale=1.0)
        for pair in self._pairs.values():
            self._run(pair.serial, 0, q, nothing, spec, q)
            if _num_threads() > 1:
                with _thread_pool:
                    self._run(pair.parallel, 0, q, nothing, spec, q)

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Array) -> None:
        """Write k and v [T, kv_heads, head_dim], any float dtype, to int64 slots [T] of one layer."""
        keys, values = (as_array(rows.contiguous()) for rows in self._converted(layer, k, v))
        cpu_kernels.store(self.pages, layer, keys, values, slots)

    def attend(self, layer: int, q: Tensor, work: PagedQueries, spec: AttentionSpec, out: Tensor) -> None:
        """q [T, heads, head_dim] to the rows of `out`, of that shape, that are the queries' tokens.

        Both are dense float32. `work` was planned with the window of `spec`.
        """
        pair = self._pairs[spec.soft_cap is not None]
        threads = _num_threads()
        if not self.worth_threads(work) or not _thread_pool.acquire(blocking=False):
            self._run(pair.serial, layer, q, work, spec, out)
            return
        try:
            numba.set_num_threads(threads)
            self._run(pair.parallel, layer, q, work, spec, out)
        finally:
            _thread_pool.release()

    def worth_threads(self, work: PagedQueries) -> bool:
        """Whether `work` is best shared by several threads, and there are any."""
        return _num_threads() > 1 and work.rows_read * self._row_bytes >= PARALLEL_BYTES

    def _run(
        self, kernel: AttendKernel, layer: int, q: Tensor, work: PagedQueries, spec: AttentionSpec, out: Tensor
    ) -> None:
        partial = np.empty((len(work.tasks), q.shape[1], self._head_dim + STATISTICS), np.float32)
        scale, soft_cap = np.float32(spec.scale), np.float32(spec.soft_cap or 0.0)
        kernel(
            self.pages,
            layer,
            q.numpy(),
            scale,
            soft_cap,
            work.page_table,
            work.tasks,
            work.queries,
            partial,
            out.numpy(),
        )


def _num_threads() -> int:
    """As many as torch is told to use."""
    return min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
