"""What each kernel is measured at: tensors of a real model's shapes, the work it cannot avoid, and how others do it.

Work is bytes that have to be read and written once, or floating-point operations; a share of the ceiling follows from
it. Peers compute the same from what suits them best (attention: dense K and V instead of pages), so that a kernel over
pages that is as fast as they are pays nothing for its pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu.shapes import Shape
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.attention.triton_backend import TritonBackend
from tandem_engine.forward.forward_batch import ForwardBatch, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.kernels.fused_moe import fused_experts
from tandem_engine.kernels.gated_activation import gated_activation
from tandem_engine.kernels.head_turn import HeadTurn
from tandem_engine.kernels.page_copy import copy_pages
from tandem_engine.kernels.rms_norm import add_rms_norm
from tandem_engine.kernels.rope_store import rotate_and_store
from tandem_engine.kernels.sampling import sample
from tandem_engine.kernels.store_kv import store_kv
from tandem_engine.memory.pool import KvPool

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size."""

    name: str
    run: Callable[[], object]
    ceiling: Literal["copy", "matmul"]
    work: float
    """Bytes or operations."""
    target: float | None = None
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the cases of a run."""

    decode: tuple[tuple[int, int], ...] = ((1, 4096), (16, 4096), (64, 4096), (16, 32768))
    """Sequences, and tokens that each of them has."""
    prompt: int = 8192
    tokens: int = 8192
    """Of a step, for what works token by token."""
    sampled: int = 64
    vocabulary: int = 151_936
    experts: int = 64
    expert_inner: int = 1024


TINY = Sizes(decode=((2, 40),), prompt=48, tokens=5, sampled=2, vocabulary=300, experts=4, expert_inner=64)


@dataclass(frozen=True, kw_only=True)
class CaseMaker:
    """Makes the cases of one model on one device."""

    shape: Shape
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype

    def cases(self) -> Iterator[Callable[[], Case]]:
        for batch, context in self.sizes.decode:
            yield partial(self._decode, batch, context)
        yield partial(self._extend, self.sizes.prompt)
        yield self._rope_store
        yield self._store
        yield self._norm
        yield self._activation
        yield self._sampling
        yield self._page_copy
        yield self._experts

    def _copy_of(self, work: float) -> dict[str, Callable[[], object]]:
        """As a peer: a copy of as many bytes, for a few megabytes take longer than their share of gigabytes."""
        both = torch.empty((2, int(work) // 2), dtype=torch.uint8, device=self.device)
        return {"a copy of as many bytes": lambda: both[1].copy_(both[0])}

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def _pool(self, pages: int) -> KvPool:
        """Of one layer; the dummy page comes on top."""
        pool = KvPool(
            num_pages=pages + 1,
            num_layers=1,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            page_size=PAGE,
            dtype=self.dtype,
            device=self.device,
        )
        pool.data.normal_()
        return pool

    def _attention(self, seq_lens: list[int], extend_lens: list[int]) -> tuple[Callable[[], object], Tensor]:
        """The launch of attention alone, and its queries."""
        pages = [-(-length // PAGE) for length in seq_lens]
        pool = self._pool(sum(pages))
        shape = self.shape
        spec = AttentionSpec(scale=shape.head_dim**-0.5)
        backend = TritonBackend(pool, num_heads=shape.heads, specs=(spec,))
        plan = backend.plan(on_scrambled_pages(seq_lens, extend_lens, pages, self.device))
        q = self._randn(sum(extend_lens), shape.heads, shape.head_dim)
        return lambda: plan.attend(0, q), q

    def _decode(self, batch: int, context: int) -> Case:
        run, q = self._attention([context] * batch, [1] * batch)
        shape, itemsize = self.shape, self.dtype.itemsize
        keys, values = (self._randn(batch, shape.kv_heads, context, shape.head_dim) for _ in range(2))
        dense_q = q[:, :, None]
        return Case(
            name=f"decode attention, {batch} × {context} tokens",
            run=run,
            ceiling="copy",
            work=(2 * shape.kv_heads * context + 2 * shape.heads) * batch * shape.head_dim * itemsize,
            target=0.85 if batch >= 16 and context >= 4096 else None,
            peers={"torch SDPA": lambda: scaled_dot_product_attention(dense_q, keys, values, enable_gqa=True)},
        )

    def _extend(self, tokens: int) -> Case:
        run, q = self._attention([tokens], [tokens])
        shape = self.shape
        keys, values = (self._randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        dense_q = q.transpose(0, 1)[None]

        def sdpa() -> Tensor:
            return scaled_dot_product_attention(dense_q, keys, values, is_causal=True, enable_gqa=True)

        return Case(
            name=f"extend attention, {tokens} tokens",
            run=run,
            ceiling="matmul",
            work=2 * shape.heads * shape.head_dim * tokens * tokens,
            target=0.6,
            peers={"torch SDPA": sdpa},
        )

    def _kv(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """K, V, their pages and slots, of a step."""
        tokens, shape = self.sizes.tokens, self.shape
        pool = self._pool(-(-tokens // PAGE))
        k, v = (self._randn(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        keys, values = pool.key_value(0)
        return k, v, keys, values, torch.randperm(tokens, device=self.device) + PAGE

    def _rope_store(self) -> Case:
        k, v, keys, values, slots = self._kv()
        tokens, shape = self.sizes.tokens, self.shape
        q = self._randn(tokens, shape.heads, shape.head_dim)
        cos, sin = (self._randn(tokens, shape.head_dim) for _ in range(2))
        work = 2 * tokens * shape.head_dim * (shape.heads + 2 * shape.kv_heads + 1) * self.dtype.itemsize
        return Case(
            name=f"RoPE and KV write, {tokens} tokens",
            run=lambda: rotate_and_store(q, k, v, HeadTurn(cos, sin, None), keys, values, slots),
            ceiling="copy",
            work=work,
            target=0.85,
            peers=self._copy_of(work),
        )

    def _store(self) -> Case:
        k, v, keys, values, slots = self._kv()

        def index_put() -> None:
            pages, places = slots // PAGE, slots % PAGE
            keys[pages, :, places] = k
            values[pages, :, places] = v

        return Case(
            name=f"KV write, {self.sizes.tokens} tokens",
            run=lambda: store_kv(k, v, keys, values, slots),
            ceiling="copy",
            work=2 * (k.nbytes + v.nbytes),
            target=0.85,
            peers={"torch index_put": index_put, **self._copy_of(2 * (k.nbytes + v.nbytes))},
        )

    def _norm(self) -> Case:
        tokens, hidden = self.sizes.tokens, self.shape.hidden
        stream, delta, weight = self._randn(tokens, hidden), self._randn(tokens, hidden), self._randn(hidden)

        def torch_norm() -> Tensor:
            stream.add_(delta)
            return torch.nn.functional.rms_norm(stream, (hidden,), weight, 1e-6)

        return Case(
            name=f"RMSNorm with residual, {tokens} tokens",
            run=lambda: add_rms_norm(stream, delta, weight, eps=1e-6),
            ceiling="copy",
            work=4 * stream.nbytes,
            target=0.85,
            peers={"torch rms_norm": torch_norm, **self._copy_of(4 * stream.nbytes)},
        )

    def _activation(self) -> Case:
        gate_up = self._randn(self.sizes.tokens, 2 * self.shape.inner)
        inner = self.shape.inner
        return Case(
            name=f"SwiGLU, {self.sizes.tokens} tokens",
            run=lambda: gated_activation(gate_up, "silu"),
            ceiling="copy",
            work=1.5 * gate_up.nbytes,
            target=0.85,
            peers={
                "torch": lambda: torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:],
                **self._copy_of(1.5 * gate_up.nbytes),
            },
        )

    def _sampling(self) -> Case:
        rows, vocabulary = self.sizes.sampled, self.sizes.vocabulary
        logits = torch.randn((rows, vocabulary), device=self.device)
        ones, ids = torch.ones(rows, device=self.device), torch.arange(rows, device=self.device)

        def by_sorting() -> Tensor:
            probabilities, tokens = logits.softmax(-1).sort(-1, descending=True)
            probabilities[probabilities.cumsum(-1) - probabilities > 0.9] = 0.0
            return tokens.gather(1, probabilities.multinomial(1))

        filters = {"top_k": torch.full_like(ids, 50), "top_p": ones * 0.9, "min_p": torch.zeros_like(ones)}
        return Case(
            name=f"sampling with top-k and top-p, {rows} × {vocabulary}",
            run=lambda: sample(logits, temperature=ones, seed=ids, position=ids, **filters),
            ceiling="copy",
            work=logits.nbytes,
            peers={"torch sort": by_sorting},
        )

    def _page_copy(self) -> Case:
        count = -(-self.sizes.tokens // PAGE)
        pool = self._pool(2 * count).bytes_view()
        pages, copies = (torch.randperm(2 * count, device=self.device) + 1).split(count)
        return Case(
            name=f"page copies, {count} pages",
            run=lambda: copy_pages(pool, pages, copies),
            ceiling="copy",
            work=2 * count * pool.shape[1],
            peers={"torch index_select": lambda: torch.index_select(pool, 0, pages)},
        )

    def _experts(self) -> Case:
        sizes, hidden = self.sizes, self.shape.hidden
        chosen = 2
        x = self._randn(sizes.tokens, hidden)
        experts = torch.rand((sizes.tokens, sizes.experts), device=self.device).topk(chosen, dim=1).indices.int()
        weights = self._randn(sizes.tokens, chosen)
        gate_up = self._randn(sizes.experts, 2 * sizes.expert_inner, hidden)
        down = self._randn(sizes.experts, hidden, sizes.expert_inner)
        return Case(
            name=f"fused MoE, {sizes.tokens} tokens, {chosen} of {sizes.experts} experts",
            run=lambda: fused_experts(x, experts, weights, gate_up, down, activation="silu"),
            ceiling="matmul",
            work=6 * sizes.tokens * chosen * hidden * sizes.expert_inner,
        )


def on_scrambled_pages(
    seq_lens: list[int], extend_lens: list[int], pages: list[int], device: torch.device
) -> ForwardBatch:
    """A step whose sequences have so many pages each, in no order, of a pool that has no others."""
    order = torch.randperm(sum(pages)) + 1
    table = torch.zeros((len(seq_lens), max(pages)), dtype=torch.int32)
    places = []
    taken = 0
    for row, (length, new, count) in enumerate(zip(seq_lens, extend_lens, pages, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(length - new, length)
        places.append(table[row, positions // PAGE].long() * PAGE + positions % PAGE)
    slots = torch.cat(places)
    num_extend = sum(new > 1 for new in extend_lens)
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.EXTEND if num_extend else ForwardMode.DECODE,
        input_ids=torch.ones_like(slots).to(device),
        positions=torch.zeros_like(slots).to(device),
        out_cache_loc=slots.to(device),
        rows=torch.ones(len(seq_lens), dtype=torch.int64, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        extend_lens=torch.tensor(extend_lens, device=device),
        page_table=table.to(device),
        num_extend=num_extend,
        sample_index=none,
        sampling=SamplingBatch(temperature=empty, top_k=none, top_p=empty, min_p=empty, seed=none, position=none),
    )
