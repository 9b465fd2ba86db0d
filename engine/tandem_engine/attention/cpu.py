"""The CPU backend: two compiled kernels that read pages in place.

    tokens of a step            how                                       why
    DECODE                      paged kernel: one query at a time         bound by memory: reads each page once
    a few on a cached prefix    the same, one query per token             too few to fill the lanes of the other
    a token and its drafts      the same                                  the bits that decodes one by one would have
    any other EXTEND            block kernel: matrix products of blocks   bound by arithmetic
                                of queries and blocks of keys

Which way a sequence goes depends on that sequence alone, and so does its result. A step is planned once for
each distinct `AttentionSpec` of the layers: once for most models, twice where some layers have a window.
A window bounds what is read and computed, not only what counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_engine.attention.cpu_extend import BlockAttention, Extend, Run
from tandem_engine.attention.cpu_float8 import ScaledPlan
from tandem_engine.attention.cpu_paged import PagedKernels, PagedQueries, Query, plan_paged
from tandem_engine.attention.pieces import Array
from tandem_engine.attention.spec import AttentionSpec, distinct
from tandem_engine.config import MAX_DRAFT_TOKENS
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.memory.pool import KvPool

SHORT_EXTEND = 8
"""Longest run of prompt tokens on a cached prefix that the paged kernel takes,"""
SHORT_LANES = 16
"""and how many queries it may have for each K/V head: as many take the block kernel no longer (ADR 0022)."""
LONGEST_CHAIN = 1 + MAX_DRAFT_TOKENS
"""Of a decode that verifies drafts, which the paged kernel always takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A step as the layers of one spec see it."""

    spec: AttentionSpec
    paged: PagedQueries | None
    extend: Extend | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """Implements `AttentionPlan`."""

    kernels: PagedKernels
    blocks: BlockAttention
    slots: Array
    views: tuple[View, ...]
    view_of_layer: tuple[int, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kernels.store(layer, k, v, self.slots)
        return self.gather(layer, q.float().contiguous()).to(q.dtype).flatten(1)

    def gather(self, layer: int, queries: Tensor) -> Tensor:
        """What queries [T, heads, head_dim], dense float32, gather of stored K and V; the same shape."""
        view = self.views[self.view_of_layer[layer]]
        out = torch.empty(queries.shape)
        if view.paged is not None:
            self.kernels.attend(layer, queries, view.paged, view.spec, out)
        if view.extend is not None:
            self.blocks.attend(layer, queries, view.extend, out)
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
        assert len(specs) == pool.data.shape[1], f"{len(specs)} specs for a pool of {pool.data.shape[1]} layers"
        self._pool = pool
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
                window=spec.window,
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
        if prefix_len > 0 and extend_len <= (LONGEST_CHAIN if row in verifying else longest_short):
            extends.short += [
                Query(start + i, row, spec.first_seen(prefix_len + i), prefix_len + i + 1) for i in range(extend_len)
            ]
        else:
            extends.runs.append(Run(start=start, row=row, position=prefix_len, length=extend_len))
        extends.num_tokens += extend_len
    return extends


def _verifying(batch: ForwardBatch) -> frozenset[int]:
    """Sequences that compute drafts behind their last token."""
    if not batch.draft_lens:
        return frozenset()
    return frozenset(row for row, drafts in zip(batch.sample_index.tolist(), batch.draft_lens, strict=True) if drafts)
