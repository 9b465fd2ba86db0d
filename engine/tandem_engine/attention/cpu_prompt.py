"""Prompts on a CPU: torch's fused attention, one sequence at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem_engine.memory.pool import KvPool


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPrefix:
    """What a sequence with a cached prefix needs beside its own q, k and v."""

    pages: Tensor
    """[n] int64 pages of the whole sequence."""
    seq_len: int
    mask: Tensor
    """[tokens, seq_len] of q's dtype, added to the scores: 0 or −inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Tokens [start, stop) of a step: one EXTEND sequence."""

    start: int
    stop: int
    prefix: CachedPrefix | None
    """None when the step computes the sequence from its first token: its k and v are all there is."""


def plan_prompt(start: int, extend_len: int, seq_len: int, page_row: Tensor, pool: KvPool) -> Prompt:
    """A sequence of `seq_len` tokens, the last `extend_len` of them computed now, on the pages of `page_row` [P].

    Its tokens stand at `start` among those of the step.
    """
    stop = start + extend_len
    prefix_len = seq_len - extend_len
    if prefix_len == 0:
        return Prompt(start=start, stop=stop, prefix=None)
    mask = torch.full((extend_len, seq_len), -torch.inf, dtype=pool.data.dtype).triu(prefix_len + 1)
    pages = page_row[: -(-seq_len // pool.page_size)].long()
    return Prompt(start=start, stop=stop, prefix=CachedPrefix(pages=pages, seq_len=seq_len, mask=mask))


def attend_prompt(pool: KvPool, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: Prompt) -> Tensor:
    """q [tokens, heads, D] and k, v [tokens, kv_heads, D] of this sequence, stored already, to q's shape."""
    mask = None
    if prompt.prefix is not None:
        mask = prompt.prefix.mask.to(q.dtype)
        k, v = (_gather(side, prompt.prefix).to(q.dtype) for side in pool.key_value(layer))
    # The query heads of one K/V head form a batch that shares it by a stride of 0, without a copy.
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    queries = q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    keys, values = (rows.transpose(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1) for rows in (k, v))
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _gather(side: Tensor, prefix: CachedPrefix) -> Tensor:
    """K or V [page, kv_head, slot, D] of one layer to [seq_len, kv_heads, D] of one sequence."""
    return side[prefix.pages].transpose(1, 2).flatten(0, 1)[: prefix.seq_len]
