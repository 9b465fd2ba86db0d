"""Attention over pages, as decodes and as prompts, beside torch's own over dense K and V."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gpu.cases import CASE_S, PAGE, Case, CaseMaker
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.attention.triton_backend import TritonBackend
from tandem_engine.forward.forward_batch import ForwardBatch, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode

FLEX_S = 20.0
"""What a case takes beside FlexAttention, which is compiled for its shape."""
TARGET_BATCH, TARGET_CONTEXT = 16, 4096
"""Decodes of at least so many sequences and tokens have a target."""


class AttentionCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        for batch, context in self.sizes.decode:
            yield partial(self._decode, batch, context)
        yield partial(self._extend, self.sizes.prompt)

    def _attention(self, seq_lens: list[int], extend_lens: list[int]) -> tuple[Callable[[], object], Tensor]:
        """The launch of attention alone, and its queries."""
        pages = [-(-length // PAGE) for length in seq_lens]
        pool = self.pool(sum(pages))
        shape = self.shape
        spec = AttentionSpec(scale=shape.head_dim**-0.5)
        backend = TritonBackend(pool, num_heads=shape.heads, specs=(spec,))
        plan = backend.plan(on_scrambled_pages(seq_lens, extend_lens, pages, self.device))
        q = self.randn(sum(extend_lens), shape.heads, shape.head_dim)
        return lambda: plan.attend(0, q), q

    def _decode(self, batch: int, context: int) -> Case:
        run, q = self._attention([context] * batch, [1] * batch)
        shape, itemsize = self.shape, self.dtype.itemsize
        keys, values = (self.randn(batch, shape.kv_heads, context, shape.head_dim) for _ in range(2))
        dense_q = q[:, :, None]
        peers = {"torch SDPA": lambda: scaled_dot_product_attention(dense_q, keys, values, enable_gqa=True)}
        measured = batch >= TARGET_BATCH and context >= TARGET_CONTEXT
        if measured:
            peers["FlexAttention"] = flex_attention_of(dense_q, keys, values, causal=False)
        return Case(
            name=f"decode attention, {batch} × {context} tokens",
            run=run,
            ceiling="copy",
            work=(2 * shape.kv_heads * context + 2 * shape.heads) * batch * shape.head_dim * itemsize,
            target=0.85 if measured else None,
            peers=peers,
            takes_s=FLEX_S if measured else CASE_S,
        )

    def _extend(self, tokens: int) -> Case:
        run, q = self._attention([tokens], [tokens])
        shape = self.shape
        keys, values = (self.randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        dense_q = q.transpose(0, 1)[None]

        def sdpa() -> Tensor:
            return scaled_dot_product_attention(dense_q, keys, values, is_causal=True, enable_gqa=True)

        return Case(
            name=f"extend attention, {tokens} tokens",
            run=run,
            ceiling="matmul",
            work=2 * shape.heads * shape.head_dim * tokens * tokens,
            target=0.6,
            peers={"torch SDPA": sdpa, "FlexAttention": flex_attention_of(dense_q, keys, values, causal=True)},
            takes_s=FLEX_S,
        )


def flex_attention_of(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    """Of dense [batch, heads, tokens, head_dim]; compiled, where there is a device to compile it for."""
    attend: Callable[..., Tensor] = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    mask = None
    if causal:
        mask = create_block_mask(
            lambda _batch, _head, query, key: query >= key, None, None, q.shape[2], keys.shape[2], device=q.device.type
        )
    return lambda: attend(q, keys, values, block_mask=mask, enable_gqa=True)


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
