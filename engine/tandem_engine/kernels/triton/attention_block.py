"""A tile of query rows meets a block of keys in pages: the step that both attention kernels repeat.

    s      = cap(q·kᵀ · scale)                     scores in powers of two, −∞ where a row does not see a key
    m'     = max(m, max s)                         highest score of a row so far
    w      = 2^(s − m')                            weights, at most 1
    total  = total · 2^(m − m') + Σ w
    acc    = acc · 2^(m − m') + w·v                a row's result is acc / total, once all blocks have been

Products run on tensor cores in the dtype of q (`operand`); scores, weights and sums are float32. float32 inputs are
multiplied as such, not as TF32. K and V of another dtype (float8) are converted to q's as they are read.

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

_LOG2_E = tl.constexpr(LOG2_E)

FEWEST = 16
"""Rows and columns of a tensor-core tile."""


def factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """`scale` and `cap` as `attend_block` wants them: scores are powers of two, and tanh x is made of e^2x."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E


@triton.jit
def sink_scores(sinks, query_head):
    """What the softmax of rows of these query heads starts from, in powers of two: highest so far, of weight 1."""
    return tl.load(sinks + query_head) * _LOG2_E


@triton.jit
def page_ids(table, block, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of tokens [block, block + BLOCK_N), as `attend_block` takes them: one number if they share a page.

    A loop loads them for the next block at the end of its body. Then the address of K and V depends on no load of the
    same iteration, and the compiler keeps several blocks in flight; otherwise it has a single buffer, which is filled,
    awaited and read in turn. `last` is the place of the sequence's last page in the table: nothing behind it is read.
    """
    token = block if PAGE_SIZE % BLOCK_N == 0 else block + tl.arange(0, BLOCK_N)
    return tl.load(table + tl.minimum(token // PAGE_SIZE, last))


@triton.jit
def operand(q, keys):
    """`q` in the dtype in which it is multiplied with what `keys` points to.

    Float8 becomes float16 by one instruction for two numbers, but bfloat16 only by way of float32. bfloat16 of at most
    65504 is float16 without a rounding above 2^-14; larger numbers are cut off there.
    """
    return _as_float16(q) if keys.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16 else q


@triton.jit
def _as_float16(q):
    return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def attend_block(
    q,
    highest,
    total,
    acc,
    block,
    page,
    first,
    end,
    low,
    high,
    keys,
    values,
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

    page         its pages: of `page_ids`
    first, end   [M] row m sees tokens in [first[m], end[m]); `first` counts with WINDOWED alone
    low, high    no row sees a token outside of them
    keys, values of one head of page 0
    MASKED       false if all rows see all tokens of the block
    """
    token = block + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    at = page.to(tl.int64) * page_stride + (token % PAGE_SIZE) * HEAD_DIM
    k_at = keys + at[None, :] + column[:, None]
    v_at = values + at[:, None] + column[None, :]
    if MASKED:
        live = (token >= low) & (token < high)
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
