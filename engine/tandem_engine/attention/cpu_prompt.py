"""Prompts on a CPU: torch's matrix products, one sequence at a time.

    spec and sequence                        how
    sees everything, nothing cached          torch's fused attention, causal
    sees everything, on a cached prefix      the same with a mask, over gathered pages
    a window shorter than the sequence,      blocks of queries, each over the keys that some of them see; fused
    or capped scores                         unless capped, which torch's fused attention cannot do

Which it is depends on the sequence and its spec alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem_engine.attention.cpu_kernels import Array
from tandem_engine.attention.cpu_paged import PagedKernels
from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.memory.pool import KvPool

QUERY_BLOCK = 256
"""Queries that share one range of keys: wide enough for the matrix products, narrow beside usual windows."""
CAPPED_BLOCK = 128
"""The same where scores are written down: those of one head over a few thousand keys fit a core's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedKeys:
    """Where K and V of a sequence lie whose oldest needed tokens are not among the step's own."""

    pages: Array
    """[n] int64 pages, the first one that any query needs to the last one of the sequence."""
    begin: int
    """Slot of those pages that holds the first key."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries [start, stop) of a prompt over keys [first_key, last_key); all counted from the prompt's first."""

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor
    """[stop − start, last_key − first_key] of the pool's dtype, added to the scores: 0 or −inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Tokens [start, stop) of a step: one EXTEND sequence, planned for one spec."""

    start: int
    stop: int
    spec: AttentionSpec
    cached: CachedKeys | None
    """None when the step computes the sequence from its first token: its k and v are all there is."""
    blocks: tuple[Block, ...]
    """() when one causal attention over everything will do."""


def plan_prompt(
    start: int, extend_len: int, seq_len: int, page_row: Tensor, pool: KvPool, spec: AttentionSpec
) -> Prompt:
    """A sequence of `seq_len` tokens, the last `extend_len` of them computed now, on the pages of `page_row` [P].

    Its tokens stand at `start` among those of the step.
    """
    prefix_len = seq_len - extend_len
    window = spec.window if spec.window is not None and spec.window < seq_len else None
    in_blocks = window is not None or spec.soft_cap is not None
    first_key = 0 if window is None else spec.first_seen(prefix_len)
    blocks: tuple[Block, ...] = ()
    if in_blocks or prefix_len > 0:
        # Without a window one mask over everything is as good as blocks, and one fused call is cheaper.
        width = extend_len if not in_blocks else QUERY_BLOCK if spec.soft_cap is None else CAPPED_BLOCK
        blocks = tuple(_blocks(prefix_len, seq_len, first_key, width, window, pool.data.dtype))
    return Prompt(
        start=start,
        stop=start + extend_len,
        spec=spec,
        cached=_cached(page_row, first_key, seq_len, pool.page_size) if prefix_len > 0 else None,
        blocks=blocks,
    )


def attend_prompt(kernels: PagedKernels, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: Prompt) -> Tensor:
    """q [tokens, heads, D] and k, v [tokens, kv_heads, D] of this sequence, stored already, to q's shape."""
    cached = prompt.cached
    if cached is None:
        sides = k.transpose(0, 1), v.transpose(0, 1)
    else:
        sides = kernels.gather(layer, cached.pages, cached.begin, cached.count)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    queries = q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    # The query heads of one K/V head form a batch that shares it by a stride of 0, without a copy.
    keys, values = (rows.to(q.dtype)[:, None].expand(-1, queries.shape[1], -1, -1) for rows in sides)
    if prompt.blocks:
        parts = [_attend_block(queries, keys, values, block, prompt.spec) for block in prompt.blocks]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    else:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=prompt.spec.scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _cached(page_row: Tensor, first_key: int, seq_len: int, page_size: int) -> CachedKeys:
    first_page = first_key // page_size
    return CachedKeys(
        pages=page_row[first_page : -(-seq_len // page_size)].numpy().astype(np.int64),
        begin=first_key - first_page * page_size,
        count=seq_len - first_key,
    )


def _blocks(
    prefix_len: int, seq_len: int, first_key: int, width: int, window: int | None, dtype: torch.dtype
) -> Iterator[Block]:
    """Queries at positions [prefix_len, seq_len), `width` at a time, each with the keys from `first_key` it needs."""
    for begin in range(prefix_len, seq_len, width):
        end = min(begin + width, seq_len)
        oldest = 0 if window is None else max(begin + 1 - window, 0)
        mask = torch.full((end - begin, end - oldest), -torch.inf, dtype=dtype).triu(begin - oldest + 1)
        if window is not None:
            unseen = torch.ones(mask.shape, dtype=torch.bool).tril(begin - oldest - window)
            mask.masked_fill_(unseen, -torch.inf)
        yield Block(
            start=begin - prefix_len,
            stop=end - prefix_len,
            first_key=oldest - first_key,
            last_key=end - first_key,
            mask=mask,
        )


def _attend_block(queries: Tensor, keys: Tensor, values: Tensor, block: Block, spec: AttentionSpec) -> Tensor:
    """[KV, group, tokens, D] queries over [KV, group, count, D] keys and values, to the block's rows of queries."""
    q = queries[:, :, block.start : block.stop]
    k, v = (rows[:, :, block.first_key : block.last_key] for rows in (keys, values))
    mask = block.mask.to(q.dtype)
    if spec.soft_cap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    return _attend_capped(q, k, v, mask, scale=spec.scale, soft_cap=spec.soft_cap)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, soft_cap: float) -> Tensor:
    """As `scaled_dot_product_attention`, with capped scores. A head at a time: all at once would not fit a cache."""
    out = q.new_empty(q.shape)
    queries = q.float() * (scale / soft_cap)
    for head in product(range(q.shape[0]), range(q.shape[1])):
        bounded = torch.mm(queries[head], k[head].float().T).tanh_()
        weights = torch.add(mask, bounded, alpha=soft_cap).softmax(dim=-1)
        out[head] = torch.mm(weights, v[head].float())
    return out
