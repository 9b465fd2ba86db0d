"""A tile of query rows meets a block of keys in pages: the step that both attention kernels repeat.

    s      = cap(q·kᵀ · scale)                     scores in powers of two, −∞ where a row does not see a key
    m'     = max(m, max s)                         highest score of a row so far
    w      = 2^(s − m')                            weights, at most 1
    total  = total · 2^(m − m') + Σ w
    acc    = acc · 2^(m − m') + w·v                a row's result is acc / total, once all blocks have been

Products run on tensor cores in the dtype of q; scores, weights and sums are float32. float32 inputs are multiplied as
such, not as TF32. K and V of another dtype (float8) are converted to q's as they are read.

K and V lie in pages of PAGE_SIZE tokens, [page, kv_head, slot, HEAD_DIM] with a stride between pages; a head of a page
is dense. Token t of a sequence is in slot t % PAGE_SIZE of page table[t // PAGE_SIZE]. Tokens outside [low, high) are
not read, so it does not matter what lies there, NaN included [finite-padding].

Source: Dao, FlashAttention-2, 2023; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
FEWEST = 16
"""Rows and columns of a tensor-core tile."""


def factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """`scale` and `cap` as `attend_block` wants them: scores are powers of two, and tanh x is made of e^2x."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E


@triton.jit
def attend_block(
    q,
    highest,
    total,
    acc,
    block,
    first,
    end,
    low,
    high,
    keys,
    values,
    table,
    page_stride,
    scale,
    cap,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Let rows of q [M, BLOCK_D] see tokens [block, block + BLOCK_N). Returns highest [M], total [M], acc [M, BLOCK_D].

    first, end   [M] row m sees tokens in [first[m], end[m]); `first` counts with WINDOWED alone
    low, high    no row sees a token outside of them
    keys, values of one head of page 0
    table        the sequence's pages
    MASKED       false if all rows see all tokens of the block
    """
    token = block + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    if MASKED:
        live = (token >= low) & (token < high)
        page = tl.load(table + token // PAGE_SIZE, mask=live, other=0)
    else:
        page = tl.load(table + token // PAGE_SIZE)
    at = page.to(tl.int64) * page_stride + (token % PAGE_SIZE) * HEAD_DIM
    k_at = keys + at[None, :] + column[:, None]
    v_at = values + at[:, None] + column[None, :]
    if MASKED:
        k = tl.load(k_at, mask=live[None, :] & (column < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=live[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_at, mask=(column < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)

    s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if CAPPED:
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s))
    if MASKED:
        seen = live[None, :] & (token[None, :] < end[:, None])
        if WINDOWED:
            seen = seen & (token[None, :] >= first[:, None])
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(highest, tl.max(s, axis=1))
    # A row that has seen nothing yet counts from 0, for −∞ − −∞ is no number.
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    weights = tl.exp2(s - base[:, None])
    factor = tl.exp2(highest - base)
    total = total * factor + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * factor[:, None], input_precision="ieee")
    return new, total, acc


def check_layout(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Kernels compute addresses of what is dense from its shape alone."""
    kv_heads, page_size, head_dim = keys.shape[1:]
    heads = q.shape[1:]
    assert heads[1] == head_dim, f"q has heads of {heads[1]}, K of {head_dim}"
    assert heads[0] % kv_heads == 0, f"{heads[0]} query heads share {kv_heads} K/V heads"
    assert q.stride()[1:] == (head_dim, 1), f"q of strides {q.stride()}"
    assert out.shape == q.shape, f"out of shape {tuple(out.shape)}, q of {tuple(q.shape)}"
    assert out.is_contiguous(), f"out of strides {out.stride()}"
    dense = (page_size * head_dim, head_dim, 1)
    for side in (keys, values):
        assert side.stride()[1:] == dense, f"pages of strides {side.stride()}"
    assert keys.stride() == values.stride(), f"K of strides {keys.stride()}, V of {values.stride()}"
