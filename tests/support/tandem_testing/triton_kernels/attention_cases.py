"""Batches over pages for the attention kernels, with what float64 makes of them.

What no row may read is NaN: unused pages, slots behind a sequence's end. So a result without NaN says that it was
not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem_engine.kernels.triton.common import facts_of
from tandem_engine.kernels.triton.decode_attention import Partials, decode_attention, decode_block_m, decode_tiling
from tandem_engine.kernels.triton.extend_attention import extend_attention, extend_tiling
from tandem_engine.kernels.triton.work_list import Bounds, Rows, Splitting, WorkList, splitting_of
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import attend_dense

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Of results that are means of normal numbers: some units of the last place of the dtype, and of the weights in it."""
DEVICE_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}
"""Of a GPU: 6.5e-6 was seen on an H200 over prompts of thousands of tokens."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of a model, and how the pool holds them."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def spec(
        self,
        *,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> AttentionSpec:
        return AttentionSpec(scale=self.head_dim**-0.5, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks)

    def sinks(self, device: str) -> Tensor:
        """One that takes all the weight, one that takes none, and some between."""
        return torch.tensor([20.0, -20.0, 1.5, 3.0] * self.heads, device=device)[: self.heads].contiguous()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer's attention of one batch."""

    heads: Heads
    q: Tensor
    keys: Tensor
    values: Tensor
    rows: Rows
    lens: tuple[tuple[int, int], ...]
    """(queries, tokens) of each row."""

    @classmethod
    def make(cls, heads: Heads, lens: Sequence[tuple[int, int]], device: str, *, seed: int = 0) -> "Case":
        """Random q, K and V for rows of (queries, tokens), in pages dealt out in a scrambled order."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-seq_len // heads.page_size) for _, seq_len in lens]
        order = torch.randperm(sum(counts) + 1, generator=generator) + 1
        table = torch.zeros((len(lens), max(1, *counts)), dtype=torch.int32)
        # Two layers, of which the second is used; the dummy page is finite [dummy-page].
        shape = (sum(counts) + 2, 2, 2, heads.kv_heads, heads.page_size, heads.head_dim)
        pool = torch.full(shape, torch.nan, dtype=heads.dtype)
        pool[0] = 0
        for row, ((_, seq_len), count) in enumerate(zip(lens, counts, strict=True)):
            pages, order = order[:count], order[count:]
            table[row, :count] = pages
            slots = torch.arange(seq_len)
            side = torch.randn((2, seq_len, *shape[3:4], heads.head_dim), generator=generator).to(heads.dtype)
            pool[pages[slots // heads.page_size], 1, :, :, slots % heads.page_size] = side.transpose(0, 1)
        tokens = sum(queries for queries, _ in lens)
        # Tokens of q lie as far apart as in a projection that makes q, K and V at once.
        width = heads.heads + 2 * heads.kv_heads
        qkv = torch.randn((tokens, width, heads.head_dim), generator=generator).to(heads.dtype)
        there = pool.to(device)
        return cls(
            heads=heads,
            q=qkv.to(device)[:, : heads.heads],
            keys=there[:, 1, 0],
            values=there[:, 1, 1],
            rows=Rows(
                table.to(device),
                torch.tensor([queries for queries, _ in lens], dtype=torch.int32, device=device),
                torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32, device=device),
            ),
            lens=tuple(lens),
        )

    def only(self, row: int) -> "Case":
        """That row without its company."""
        start = sum(queries for queries, _ in self.lens[:row])
        part = slice(row, row + 1)
        return replace(
            self,
            q=self.q[start : start + self.lens[row][0]],
            rows=Rows(*(column[part] for column in self.rows)),
            lens=self.lens[part],
        )

    def converted(self, dtype: torch.dtype, *, scales: tuple[Tensor, Tensor] | None = None) -> "Case":
        """The same with K and V of `dtype`, times `scales` [kv_heads] each."""
        sides = [self.keys.float(), self.values.float()]
        if scales:
            sides = [side * scale[:, None, None] for side, scale in zip(sides, scales, strict=True)]
        keys, values = (side.to(dtype) for side in sides)
        return replace(self, keys=keys, values=values)

    def expected(self, spec: AttentionSpec) -> Tensor:
        """[T, heads, head_dim] float64"""
        parts, start = [], 0
        for row, (queries, seq_len) in enumerate(self.lens):
            slots = torch.arange(seq_len, device=self.q.device)
            pages = self.rows.page_table[row].long()[slots // self.heads.page_size]
            keys, values = (side[pages, :, slots % self.heads.page_size].double() for side in (self.keys, self.values))
            q = self.q[start : start + queries].double()
            parts.append(attend_dense(q, keys, values, seq_len - queries, spec) if seq_len else torch.zeros_like(q))
            start += queries
        return torch.cat(parts)

    def bounds(self) -> Bounds:
        rows, pages = self.rows.page_table.shape
        return Bounds(rows, pages * self.heads.page_size, len(self.q))

    def attend(
        self,
        spec: AttentionSpec,
        *,
        max_queries: int = 1,
        splitting: Splitting | None = None,
        multiprocessors: int = 3,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What the kernels make of it: both, each its rows."""
        heads, shared = self.heads, facts_of(self.q.device).shared_bytes
        itemsize = heads.dtype.itemsize
        extend = extend_tiling(heads.head_dim, itemsize, shared)
        splitting = splitting or splitting_of(
            num_heads=heads.heads, kv_heads=heads.kv_heads, max_queries=max_queries, block_m=extend.block_m
        )
        device = self.q.device
        work = WorkList.empty(splitting, self.bounds(), span=spec.span, device=device)
        work.fill(self.rows)
        partials = Partials.empty(
            splitting, self.bounds(), kv_heads=heads.kv_heads, head_dim=heads.head_dim, device=device
        )
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=device)
        what = (self.q, self.keys, self.values, out, self.rows, work)
        k_scale, v_scale = scales or (None, None)
        how = {
            "scale": spec.scale,
            "soft_cap": spec.soft_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "sinks": spec.sinks,
        }
        tiling = decode_tiling(
            heads.head_dim,
            itemsize,
            shared,
            pool_itemsize=self.keys.dtype.itemsize,
            block_m=decode_block_m(splitting),
        )
        decode_attention(*what, partials, **how, tiling=tiling, multiprocessors=multiprocessors)
        extend_attention(*what, **how, tiling=extend)
        return out

    def check(self, spec: AttentionSpec, **how: object) -> None:
        """The kernels give what float64 does."""
        bounds = DEVICE_TOLERANCE if self.q.device.type == "cuda" else TOLERANCE
        torch.testing.assert_close(
            self.attend(spec, **how).double(), self.expected(spec), rtol=0, atol=bounds[self.heads.dtype]
        )
