"""The attention backend of CPUs: two compiled kernels that read pages in place.

    tokens of a step            how                                       why
    DECODE                      paged kernel: one query at a time         bound by memory: reads each page once
    a few on a cached prefix    the same, one query per token             too few to fill the lanes of the other
    a token and its drafts      the same                                  the bits that decodes one by one would have
    any other EXTEND            block kernel: matrix products of blocks   bound by arithmetic
                                of queries and blocks of keys

The kernel of a sequence depends on that sequence alone, and so does its result. A step is planned once for each
distinct `AttentionSpec` of the layers: once for most models, twice where some layers have a window or chunks. Those
bound what is read and computed, not only what counts. `BlockAttention` plans all runs of tokens of a step together, so
that a layer is one call, whose blocks of queries the threads share.

`ScaledPlan` is for a float8 pool: the kernels read the stored numbers, and the scales are applied around them,

    q·(k·s_k)ᵀ = (q·s_k)·kᵀ          softmax(…)·(v·s_v) = (softmax(…)·v)·s_v          for each K/V head

in float32 on both sides, so a token's result depends on its own sequence alone, as without scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import MAX_DRAFT_TOKENS
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.future_map import int64_view
from tandem_engine.kernels.cpu import attention_work
from tandem_engine.kernels.cpu.attention_work import (
    LENGTH,
    NO_WINDOW,
    QUERY_COLUMNS,
    STATISTICS,
    cut_queries,
    group_tasks,
    pages_of_tile,
    window_of,
)
from tandem_engine.kernels.cpu.block_attention import SEQUENCE_COLUMNS, TASK_COLUMNS, WORK, build_block_kernel
from tandem_engine.kernels.cpu.paged_attention import ATTEND, PHASES, PagedKernel, build_paged_kernel
from tandem_engine.kernels.cpu.pieces import Array
from tandem_engine.kernels.cpu.tensors import as_array
from tandem_engine.kernels.cpu.threads import PHASE_BYTES, team
from tandem_engine.kernels.cpu.vectors import PANEL
from tandem_engine.kernels.interface import FLOAT8
from tandem_engine.kernels.span import Span
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import Attend, AttentionSpec, distinct

MAX_TASK = 4
"""Panels of queries that share a copy of the keys. With more of them panels would push each other out of the caches."""

EXTEND_TASKS_PER_THREAD = 4
"""So many at least, if need be of fewer panels, for the threads to end together."""

PARALLEL_SCORES = 1 << 14
"""Scores of a layer from which other threads, some 5 µs away, pay."""

_LOG2_E = math.log2(math.e)


class Run(NamedTuple):
    """`length` tokens of a step from `start` on: the last ones of the sequence in `row` of the page table."""

    start: int
    row: int
    position: int
    """Of the first token."""
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    """The runs of a step, planned for one spec."""

    work: Array
    """[1] `WORK`; q, out and layer are set for each layer."""
    owned: tuple[Array, ...]
    """Arrays that `work` has the addresses of."""
    scores: int
    """How many the queries of all heads compute, at most."""


class BlockAttention:
    """The kernel for blocks of queries, bound to a pool's pages in host memory."""

    def __init__(self, pages: Array, *, num_heads: int) -> None:
        """`pages` [page, layer, 2, KV, slot, D] as `numbers` has them."""
        _, num_layers, _, kv_heads, page_size, head_dim = pages.shape
        self._pages = pages
        self._num_heads, self._kv_heads = num_heads, kv_heads
        self._constant = np.zeros(1, WORK)
        self._constant["pages"] = pages.ctypes.data
        self._constant["num_layers"], self._constant["page_size"] = num_layers, page_size
        self._constant["num_kv_heads"], self._constant["head_dim"] = kv_heads, head_dim
        self._constant["group"] = num_heads // kv_heads

    def warm_up(self) -> None:
        """Compile."""
        build_block_kernel(self._pages.dtype)

    def plan(self, runs: Sequence[Run], page_table: Tensor, spec: AttentionSpec) -> Extend:
        """`page_table` [B, P] int32 is kept, as are no other tensors."""
        table = page_table.numpy()
        group = self._num_heads // self._kv_heads
        panels = self._panels(runs, group)
        width = width_of_tasks(panels, group)
        sequences = np.array([run[:SEQUENCE_COLUMNS] for run in runs], np.int64)
        tasks = np.array(
            [
                (index, head, begin, min(begin + width, run.length))
                for index, run in enumerate(runs)
                for begin in reversed(range(0, run.length, width))
                for head in range(self._kv_heads)
            ],
            np.int64,
        ).reshape(-1, TASK_COLUMNS)
        work = self._constant.copy()
        work["num_tasks"], work["tasks"] = len(tasks), tasks.ctypes.data
        work["sequences"] = sequences.ctypes.data
        work["page_table"], work["table_width"] = table.ctypes.data, table.shape[1]
        work["window"] = window_of(spec.span)
        work["panels"] = -(-width * group // PANEL)
        work["soft_cap"] = spec.soft_cap or 0.0
        work["scale"] = spec.scale * _LOG2_E if spec.soft_cap is None else spec.scale / spec.soft_cap
        longest = NO_WINDOW if spec.span is None else spec.span.tokens
        scores = sum(run.length * min(run.position + run.length, longest) for run in runs)
        return Extend(work=work, owned=(tasks, sequences, table), scores=scores * self._num_heads)

    def attend(self, layer: int, q: Tensor, extend: Extend, out: Tensor, sinks: Tensor | None) -> None:
        """q [T, heads, D] to the rows of `out`, of that shape, that belong to the runs. Both are dense float32."""
        kernel = build_block_kernel(self._pages.dtype)
        work = extend.work
        work["next_task"], work["layer"] = 0, layer
        work["q"], work["out"] = q.data_ptr(), out.data_ptr()
        work["sinks"] = _address(sinks)
        threads = torch.get_num_threads() if extend.scores >= PARALLEL_SCORES else 1
        team().run(kernel.address, work.ctypes.data, threads)

    def _panels(self, runs: Sequence[Run], group: int) -> int:
        """Of a task: as many as leave enough tasks for all threads. No result depends on it."""
        wanted = EXTEND_TASKS_PER_THREAD * torch.get_num_threads()
        panels = MAX_TASK
        while panels > 1 and wanted > self._kv_heads * sum(-(-run.length * group // (panels * PANEL)) for run in runs):
            panels //= 2
        return panels


def _address(sinks: Tensor | None) -> int:
    """As kernels take it: 0 for none."""
    return 0 if sinks is None else sinks.data_ptr()


def width_of_tasks(panels: int, group: int) -> int:
    """Tokens of a task: as many as fit its panels, and where it can be so many that they fill them."""
    width = max(panels * PANEL // group, 1)
    filling = PANEL // math.gcd(PANEL, group)
    return width if width < filling else width // filling * filling


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledPlan:
    """Implements `Attend` by one without scales."""

    plan: Attend
    """Answers in the dtype of its queries, float32."""
    pool: KvPool

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.__call__`."""
        scales = self.pool.scales_of(layer)
        assert scales is not None, f"a pool of {self.pool.data.dtype} has no scales"
        gathered = self.plan(layer, _by_kv_head(q.float(), scales.k), k, v).view(q.shape)
        return _by_kv_head(gathered, scales.v).to(q.dtype).flatten(1)


def _by_kv_head(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, heads, D], each head times the factor [KV] of the K/V head that it reads."""
    tokens, _, size = x.shape
    return (x.reshape(tokens, len(factors), -1, size) * factors[:, None, None]).flatten(1, 2)


PARALLEL_BYTES = 1 << 18
"""K and V bytes of one layer from which other threads, some 5 µs away, pay."""

PAGED_TASKS_PER_THREAD = 2
"""At least this many, where heads can be distinguished."""


class Query(NamedTuple):
    """One token that attends to tokens [first, length) of the sequence in `row` of the page table."""

    token: int
    row: int
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedQueries:
    """The paged kernel's share of a step; arrays as `paged_attention.ATTEND` describes them."""

    queries: Array
    tasks: Array
    groups: Array
    members: Array
    page_table: Array
    rows_read: int
    """K/V rows per head that all queries read together."""


def plan_paged(
    batch: ForwardBatch, *, short: Sequence[Query], first_decode: int, span: Span | None, page_size: int
) -> PagedQueries:
    """`short` queries, then one for every DECODE sequence of `batch`, whose tokens start at `first_decode`.

    `span` bounds the decodes; `short` queries carry their own bounds.
    """
    queries = np.empty((len(short) + batch.num_sequences - batch.num_extend, QUERY_COLUMNS), np.int64)
    if short:
        queries[: len(short), : LENGTH + 1] = short
    window = window_of(span)
    tasks, rows_read = cut_queries(
        queries, len(short), int64_view(batch.seq_lens), batch.num_extend, first_decode, window
    )
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
        attention_work.store(self.pages, layer, keys, values, slots)

    def attend(self, layer: int, q: Tensor, work: PagedQueries, spec: AttentionSpec, out: Tensor) -> None:
        """q [T, heads, head_dim] to the rows of `out`, of that shape, that are the queries' tokens.

        Both are dense float32. `work` was planned with the window of `spec`, which is that of the layer.
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
        few = threads > 1 and len(work.groups) < PAGED_TASKS_PER_THREAD * threads
        record["head_parts"] = self._kv_heads if few else 1
        record["scale"], record["soft_cap"] = spec.scale, spec.soft_cap or 0.0
        record["q"], record["out"] = q.data_ptr(), out.data_ptr()
        record["sinks"] = _address(spec.sinks)
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


SHORT_EXTEND = 8
"""Longest run of prompt tokens on a cached prefix that the paged kernel takes,"""

SHORT_LANES = 16
"""and how many queries it may have for each K/V head: as many take the block kernel no longer (ADR 0022)."""

MAX_CHAIN = 1 + MAX_DRAFT_TOKENS
"""Of a decode that verifies drafts, which the paged kernel always takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A step as the layers of one spec see it."""

    spec: AttentionSpec
    paged: PagedQueries | None
    extend: Extend | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """Implements `Attend`."""

    kernels: PagedKernels
    blocks: BlockAttention
    slots: Array
    views: tuple[View, ...]
    view_of_layer: tuple[int, ...]
    specs: Sequence[AttentionSpec]
    """Of each layer, with its sinks."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kernels.store(layer, k, v, self.slots)
        return self.gather(layer, q.float().contiguous()).to(q.dtype).flatten(1)

    def gather(self, layer: int, queries: Tensor) -> Tensor:
        """What queries [T, heads, head_dim], dense float32, gather of stored K and V; the same shape."""
        view, spec = self.views[self.view_of_layer[layer]], self.specs[layer]
        out = torch.empty(queries.shape)
        if view.paged is not None:
            self.kernels.attend(layer, queries, view.paged, spec, out)
        if view.extend is not None:
            self.blocks.attend(layer, queries, view.extend, out, spec.sinks)
        return out

    def read_in_place(self) -> View | None:
        """What all layers compute, if that is the paged kernel's work alone."""
        view = self.views[0]
        return view if len(self.views) == 1 and view.extend is None and view.paged is not None else None


class CpuAttention:
    """Implements `AttentionBackend` over a float32, bfloat16 or float8 pool in host memory.

    Raises:
        ConfigError: for a pool of another dtype.
    """

    def __init__(self, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        """`specs`: one for each layer of the pool."""
        assert pool.value_width is None, "the kernels read K and V"
        assert len(specs) == pool.data.shape[1], f"{len(specs)} specs for a pool of {pool.data.shape[1]} layers"
        self._pool, self._specs = pool, specs
        self._longest_short = min(SHORT_EXTEND, SHORT_LANES * pool.data.shape[3] // num_heads)
        self._kinds, self._kind_of_layer = distinct(specs)
        self._kernels = PagedKernels(pool, num_heads=num_heads, specs=self._kinds)
        self._blocks = BlockAttention(self._kernels.pages, num_heads=num_heads)

    def plan(self, batch: ForwardBatch) -> CpuPlan | ScaledPlan:
        """A few small arrays for each distinct spec."""
        plan = CpuPlan(
            kernels=self._kernels,
            blocks=self._blocks,
            slots=batch.out_cache_loc.numpy(),
            views=tuple(self._view(batch, spec) for spec in self._kinds),
            view_of_layer=self._kind_of_layer,
            specs=self._specs,
        )
        return plan if self._pool.scales is None else ScaledPlan(plan=plan, pool=self._pool)

    def _view(self, batch: ForwardBatch, spec: AttentionSpec) -> View:
        extends = _sort_extends(batch, spec, self._longest_short) if batch.num_extend else Extends()
        paged = None
        if extends.short or not extends.runs or batch.num_extend < batch.num_sequences:
            paged = plan_paged(
                batch,
                short=extends.short,
                first_decode=extends.num_tokens,
                span=spec.span,
                page_size=self._pool.page_size,
            )
        extend = self._blocks.plan(extends.runs, batch.page_table, spec) if extends.runs else None
        return View(spec=spec, paged=paged, extend=extend)

    def warm_up(self) -> None:
        """Compile the kernels: several seconds the first time on a machine, else read from numba's cache."""
        self._kernels.warm_up()
        self._blocks.warm_up()


@dataclass(kw_only=True, slots=True)
class Extends:
    """EXTEND sequences of a step by the way they go."""

    short: list[Query] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    num_tokens: int = 0


def _sort_extends(batch: ForwardBatch, spec: AttentionSpec, longest_short: int) -> Extends:
    extends = Extends()
    verifying = _verifying(batch)
    extend_lens = batch.extend_lens[: batch.num_extend].tolist()
    for row, (extend_len, seq_len) in enumerate(zip(extend_lens, batch.seq_lens.tolist(), strict=False)):
        start, prefix_len = extends.num_tokens, seq_len - extend_len
        if prefix_len > 0 and extend_len <= (MAX_CHAIN if row in verifying else longest_short):
            extends.short += [
                Query(start + i, row, spec.first_seen(prefix_len + i), prefix_len + i + 1) for i in range(extend_len)
            ]
        else:
            extends.runs.append(Run(start=start, row=row, position=prefix_len, length=extend_len))
        extends.num_tokens += extend_len
    return extends


def _verifying(batch: ForwardBatch) -> frozenset[int]:
    """Sequences that compute drafts after their last token."""
    if not batch.draft_lens:
        return frozenset()
    return frozenset(row for row, drafts in zip(batch.sample_index.tolist(), batch.draft_lens, strict=True) if drafts)
