"""Attention over latents (MLA), of all heads on one card and of a rank of eight: decodes and prompts."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu.attention_cases import TARGET_BATCH, TARGET_CONTEXT, on_scrambled_pages
from gpu.cases import Case, CaseMaker
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.triton import TritonBackend, TritonPlan

RANK, TURNED = 512, 64
"""Of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash."""
WIDTH = RANK + TURNED
PAGE = 64
RANKS = 8
DECODES, PROMPTS = 3, 2
"""So many of the sizes."""


class LatentCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        for heads in (max(1, self.shape.heads // RANKS), self.shape.heads):
            for batch, context in self.sizes.decode[:DECODES]:
                yield partial(self._decode, heads, batch, context)
            for tokens, before in self.sizes.prompts[:PROMPTS]:
                yield partial(self._prompt, heads, tokens, before)

    def _decode(self, heads: int, batch: int, context: int) -> Case:
        """Bound by memory with 16 heads, and by arithmetic with 128: a latent is multiplied with each."""
        plan, q = self._planned(heads, [context] * batch, [1] * batch)
        keys = self.randn(batch, 1, context, WIDTH)
        few = heads * RANKS <= self.shape.heads
        measured = batch >= TARGET_BATCH and context >= TARGET_CONTEXT
        return Case(
            name=f"latent decode attention of {heads} heads, {batch} × {context} tokens, pages of {PAGE}",
            run=lambda: plan.attend(0, q),
            ceiling="copy" if few else "matmul",
            work=self._bytes(heads, batch, context) if few else 2 * heads * (WIDTH + RANK) * batch * context,
            target=(0.75 if few else 0.4) if measured else None,
            peers={"torch SDPA": lambda: scaled_dot_product_attention(q[:, None], keys, keys[..., :RANK], scale=SCALE)},
        )

    def _prompt(self, heads: int, tokens: int, before: int) -> Case:
        plan, q = self._planned(heads, [before + tokens], [tokens])
        seen = tokens * before + tokens * tokens / 2
        return Case(
            name=f"latent extend attention of {heads} heads, {tokens} tokens{f' behind {before}' if before else ''}",
            run=lambda: plan.attend(0, q),
            ceiling="matmul",
            work=2 * heads * (WIDTH + RANK) * seen,
            target=0.4,
        )

    def _bytes(self, heads: int, batch: int, context: int) -> int:
        return batch * (context * WIDTH + heads * (WIDTH + RANK)) * self.dtype.itemsize

    def _planned(self, heads: int, seq_lens: list[int], extend_lens: list[int]) -> tuple[TritonPlan, Tensor]:
        """A plan whose `attend` is the launches of attention alone, and its queries."""
        counts = [-(-length // PAGE) for length in seq_lens]
        pool = KvPool(
            num_pages=sum(counts) + 1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=WIDTH,
            page_size=PAGE,
            dtype=self.dtype,
            device=self.device,
            value_width=RANK,
        )
        pool.data.copy_(torch.randn(pool.data.shape, dtype=torch.float16, device=self.device))
        backend = TritonBackend(pool, num_heads=heads, specs=(AttentionSpec(scale=SCALE, value_width=RANK),))
        batch = on_scrambled_pages(seq_lens, extend_lens, counts, PAGE, pool.num_pages - 1, self.device)
        return backend.plan(batch), self.randn(sum(extend_lens), heads, WIDTH)


SCALE = 192**-0.5
"""Of heads of 128 + 64 numbers before they are absorbed."""
