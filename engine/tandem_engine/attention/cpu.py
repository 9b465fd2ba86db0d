"""The CPU backend: compiled kernels for decodes, torch for prompts.

    tokens of a step            how                                       why
    DECODE                      paged kernel: pages read in place         bound by memory: nothing is copied
    a few on a cached prefix    paged kernel: one query per token         reads less than a gather would copy
    a token and its drafts      the same                                  the bits that decodes one by one would have
    any other EXTEND            torch's fused attention, one sequence     bound by arithmetic, where its matmuls
                                at a time, over gathered pages            win; the gather is small beside them

Which way a sequence goes depends on that sequence alone, and so does its result. A step is planned once for
each distinct `AttentionSpec` of the layers: once for most models, twice where some layers have a window.
A window bounds what is read and computed, not only what counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tandem_engine.attention.cpu_kernels import Array
from tandem_engine.attention.cpu_paged import PagedKernels, PagedQueries, Query, plan_paged
from tandem_engine.attention.cpu_prompt import Prompt, attend_prompt, plan_prompt
from tandem_engine.attention.spec import AttentionSpec, distinct
from tandem_engine.config import MAX_DRAFT_TOKENS
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.memory.pool import KvPool

SHORT_EXTEND = 8
"""Longest run of prompt tokens on a cached prefix that the paged kernel takes (ADR 0002)."""
LONGEST_CHAIN = 1 + MAX_DRAFT_TOKENS
"""Of a decode that verifies drafts, which the paged kernel always takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A step as the layers of one spec see it."""

    spec: AttentionSpec
    paged: PagedQueries | None
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan:
    """Implements `AttentionPlan`."""

    kernels: PagedKernels
    slots: Array
    views: tuple[View, ...]
    view_of_layer: tuple[int, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kernels.store(layer, k, v, self.slots)
        view = self.views[self.view_of_layer[layer]]
        if view.paged is not None and not view.prompts:
            return self.kernels.attend(layer, q, view.paged, view.spec).to(q.dtype).flatten(1)
        out = q.new_empty(q.shape)
        if view.paged is not None:
            tokens = view.paged.tokens
            out[tokens] = self.kernels.attend(layer, q, view.paged, view.spec)[tokens].to(q.dtype)
        for prompt in view.prompts:
            part = slice(prompt.start, prompt.stop)
            out[part] = attend_prompt(self.kernels, layer, q[part], k[part], v[part], prompt)
        return out.flatten(1)

    def read_in_place(self) -> View | None:
        """What all layers compute, if that is the paged kernel's work alone, on one thread, over float32 pages."""
        view = self.views[0]
        if len(self.views) > 1 or view.prompts or view.paged is None or self.kernels.worth_threads(view.paged):
            return None
        return view if self.kernels.pages.dtype == np.float32 else None


class CpuAttention:
    """Implements `AttentionBackend` over a float32 or bfloat16 pool in host memory.

    Raises:
        ConfigError: for a pool of another dtype.
    """

    def __init__(self, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        """`specs`: one for each layer of the pool."""
        assert len(specs) == pool.data.shape[1], f"{len(specs)} specs for a pool of {pool.data.shape[1]} layers"
        self._pool = pool
        self._kinds, self._kind_of_layer = distinct(specs)
        self._kernels = PagedKernels(pool, num_heads=num_heads, specs=self._kinds)

    def plan(self, batch: ForwardBatch) -> CpuPlan:
        """For each distinct spec three small arrays for the paged kernel, and masks for prompts that need them."""
        return CpuPlan(
            kernels=self._kernels,
            slots=batch.out_cache_loc.numpy(),
            views=tuple(self._view(batch, spec) for spec in self._kinds),
            view_of_layer=self._kind_of_layer,
        )

    def _view(self, batch: ForwardBatch, spec: AttentionSpec) -> View:
        extends = _sort_extends(batch, self._pool, spec) if batch.num_extend else Extends()
        paged = None
        if extends.short or not extends.prompts or batch.num_extend < batch.num_sequences:
            paged = plan_paged(batch, short=extends.short, first_decode=extends.num_tokens, window=spec.window)
        return View(spec=spec, paged=paged, prompts=tuple(extends.prompts))

    def warm_up(self) -> None:
        """Compile the kernels: several seconds the first time on a machine, else read from numba's cache."""
        self._kernels.warm_up()


@dataclass(kw_only=True, slots=True)
class Extends:
    """EXTEND sequences of a step by the way they go."""

    short: list[Query] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    num_tokens: int = 0


def _sort_extends(batch: ForwardBatch, pool: KvPool, spec: AttentionSpec) -> Extends:
    extends = Extends()
    verifying = _verifying(batch)
    extend_lens = batch.extend_lens[: batch.num_extend].tolist()
    for row, (extend_len, seq_len) in enumerate(zip(extend_lens, batch.seq_lens.tolist(), strict=False)):
        start, prefix_len = extends.num_tokens, seq_len - extend_len
        if prefix_len > 0 and extend_len <= (LONGEST_CHAIN if row in verifying else SHORT_EXTEND):
            extends.short += [
                Query(start + i, row, spec.first_seen(prefix_len + i), prefix_len + i + 1) for i in range(extend_len)
            ]
        else:
            extends.prompts.append(plan_prompt(start, extend_len, seq_len, batch.page_table[row], pool, spec))
        extends.num_tokens += extend_len
    return extends


def _verifying(batch: ForwardBatch) -> frozenset[int]:
    """Sequences that compute drafts behind their last token."""
    if not batch.draft_lens:
        return frozenset()
    return frozenset(row for row, drafts in zip(batch.sample_index.tolist(), batch.draft_lens, strict=True) if drafts)
