"""The attention kernels of a device as they are launched over one pool: of K and V, and of latents."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tandem_engine.kernels.span import Span
from tandem_engine.kernels.triton.common import facts_of
from tandem_engine.kernels.triton.decode_attention import (
    DecodeTiling,
    Partials,
    decode_attention,
    decode_block_m,
    decode_tiling,
)
from tandem_engine.kernels.triton.extend_attention import ExtendTiling, extend_attention, extend_tiling
from tandem_engine.kernels.triton.latent_attention import (
    LatentTiling,
    latent_attention,
    latent_splitting,
    latent_tilings,
)
from tandem_engine.kernels.triton.work_list import Bounds, Rows, Splitting, WorkList, splitting_of
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKernels(ABC):
    """Attention of all layers of a pool, with tiles chosen for its shape."""

    pool: KvPool
    specs: Sequence[AttentionSpec]
    """One for each layer."""
    splitting: Splitting
    multiprocessors: int

    @classmethod
    @abstractmethod
    def of_pool(
        cls, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec], dtype: torch.dtype, max_queries: int
    ) -> Self:
        """For `num_heads` query heads of `dtype`; rows of up to `max_queries` queries are decodes."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, out: Tensor, rows: Rows, work: WorkList, partials: Partials) -> None:
        """Write the results of all rows to `out`, [T, heads, value_width]."""

    @property
    def value_width(self) -> int:
        """Numbers that a query head gathers."""
        width = self.pool.value_width
        return int(self.pool.data.shape[-1]) if width is None else width

    @property
    def device(self) -> torch.device:
        return self.pool.data.device

    def lists(self, bounds: Bounds) -> dict[Span | None, WorkList]:
        """Memory for the work of any batch within `bounds`, for each distinct span."""
        spans = dict.fromkeys(spec.span for spec in self.specs)
        return {span: WorkList.empty(self.splitting, bounds, span=span, device=self.device) for span in spans}

    def partials(self, bounds: Bounds) -> Partials:
        """Memory for partial results of any batch within `bounds`."""
        kv_heads = self.pool.data.shape[3]
        return Partials.empty(self.splitting, bounds, kv_heads=kv_heads, head_dim=self.value_width, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedAttention(PagedKernels):
    """Over K and V."""

    decode: DecodeTiling
    extend: ExtendTiling

    @classmethod
    def of_pool(
        cls, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec], dtype: torch.dtype, max_queries: int
    ) -> Self:
        """See `PagedKernels.of_pool`."""
        kv_heads, _, head_dim = pool.data.shape[3:]
        facts = facts_of(pool.data.device)
        itemsize = max(dtype.itemsize, pool.data.dtype.itemsize)
        extend = extend_tiling(head_dim, itemsize, facts.shared_bytes)
        splitting = splitting_of(
            num_heads=num_heads, kv_heads=kv_heads, max_queries=max_queries, block_m=extend.block_m
        )
        return cls(
            pool=pool,
            specs=specs,
            splitting=splitting,
            decode=decode_tiling(
                head_dim,
                dtype.itemsize,
                facts.shared_bytes,
                pool_itemsize=pool.data.dtype.itemsize,
                block_m=decode_block_m(splitting),
            ),
            extend=extend,
            multiprocessors=facts.multiprocessors,
        )

    def attend(self, layer: int, q: Tensor, out: Tensor, rows: Rows, work: WorkList, partials: Partials) -> None:
        """See `PagedKernels.attend`."""
        keys, values = self.pool.key_value(layer)
        spec, scales = self.specs[layer], self.pool.scales_of(layer)
        k_scale, v_scale = scales or (None, None)
        decode_attention(
            q, keys, values, out, rows, work, partials, scale=spec.scale, soft_cap=spec.soft_cap, sinks=spec.sinks,
            k_scale=k_scale, v_scale=v_scale, tiling=self.decode, multiprocessors=self.multiprocessors,
        )  # fmt: skip
        if work.has_tiles:
            extend_attention(
                q, keys, values, out, rows, work, scale=spec.scale, soft_cap=spec.soft_cap, sinks=spec.sinks,
                k_scale=k_scale, v_scale=v_scale, tiling=self.extend,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedLatents(PagedKernels):
    """Over latents, which every token sees all of."""

    decode: LatentTiling
    extend: LatentTiling

    @classmethod
    def of_pool(
        cls, pool: KvPool, *, num_heads: int, specs: Sequence[AttentionSpec], dtype: torch.dtype, max_queries: int
    ) -> Self:
        """See `PagedKernels.of_pool`."""
        for spec in specs:
            assert spec.span is None, f"latents with a span: {spec}"
            assert spec.soft_cap is None, f"latents with capped scores: {spec}"
            assert spec.sinks is None, "latents with sinks"
        facts = facts_of(pool.data.device)
        itemsize, width = max(dtype.itemsize, pool.data.dtype.itemsize), int(pool.data.shape[-1])
        decode, extend = latent_tilings(num_heads, itemsize, facts.shared_bytes, width=width)
        return cls(
            pool=pool,
            specs=specs,
            splitting=latent_splitting(heads=num_heads, max_queries=max_queries, block_m=extend.block_m),
            decode=decode,
            extend=extend,
            multiprocessors=facts.multiprocessors,
        )

    def attend(self, layer: int, q: Tensor, out: Tensor, rows: Rows, work: WorkList, partials: Partials) -> None:
        """See `PagedKernels.attend`."""
        latent_attention(
            q.contiguous(), self.pool.key_value(layer)[0], out, rows, work, partials, scale=self.specs[layer].scale,
            decode=self.decode, extend=self.extend, multiprocessors=self.multiprocessors,
        )  # fmt: skip
