"""What the CPU kernels compute (`tandem_engine.kernels.cpu`), in plain numpy: one function for each, without blocks,
panels, threads or instructions.

All functions compute in float64, so a kernel that computes in float32 differs by rounding alone. Where a kernel rounds
to bfloat16 between two operations, the reference does so too, with `bfloat16=True`.

    kernels.cpu.numbers          bfloat16_bits, from_bfloat16, rounded
    kernels.cpu.gemm             product (of int8 weights: of the numbers that they stand for)
    kernels.cpu.step_products    product, product_with_adapters
    kernels.cpu.row_ops          norm, rotated, silu_and_multiply
    kernels.cpu.attention_rows   scores, softmax_weights, outputs
    kernels.cpu.softmax          visible, capped, softmax_weights, pairs
    kernels.cpu.vectors          product, pairs
    kernels.cpu.paged_attention, kernels.cpu.block_attention    attention; partial results: merged
    kernels.cpu.page_digests     full_digest, sampled_digest
    kernels.cpu.first_places     first_places
    kernels.cpu.page_runs        merged_runs

`kernels.cpu.decoder_step` composes these; a step is compared with the layers of the model. The other modules of
`kernels.cpu` compile, keep and schedule kernels and compute nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Given = npt.NDArray[Any]
Bits = npt.NDArray[np.uint16]

_MASK = 2**64 - 1


def bfloat16_bits(x: Given) -> Bits:
    """The nearest bfloat16 of float32 numbers, ties to even: the upper half of their bits. A NaN stays a NaN."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    quiet = bits >> np.uint64(16) | np.uint64(0x40)
    return np.where(np.isnan(x), quiet, nearest).astype(np.uint16)


def from_bfloat16(bits: Bits) -> npt.NDArray[np.float32]:
    """The float32 numbers with these upper halves."""
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32)


def rounded(x: Given, *, bfloat16: bool) -> Floats:
    """Numbers after a stay in the model's dtype: bfloat16, or float32, which a reference does not round to."""
    return from_bfloat16(bfloat16_bits(x)).astype(np.float64) if bfloat16 else np.asarray(x, np.float64)


def product(x: Given, weight: Given, bias: Given | None = None) -> Floats:
    """x [T, K] Wᵀ + b, of a weight [N, K]."""
    return x.astype(np.float64) @ weight.astype(np.float64).T + (0.0 if bias is None else bias)


def product_with_adapters(
    x: Given, product: Given, parts: Sequence[tuple[Sequence[int], slice, Given, Given, float]]
) -> Floats:
    """product [T, N] plus s · (x Aᵀ) Bᵀ for each part of an adapter, in the rows of its tokens alone.

    A part is (tokens, outputs, A [r, K], B [width of outputs, r], s).
    """
    result = product.astype(np.float64)
    for tokens, outputs, a, b, scale in parts:
        for token in tokens:
            result[token, outputs] += b @ (a @ x[token] * scale)
    return result


def norm(x: Given, weight: Given, eps: float, *, bfloat16: bool = False) -> Floats:
    """RMS norm of rows [..., E]: x / sqrt(mean(x²) + eps) · weight."""
    x = x.astype(np.float64)
    normal = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return rounded(rounded(normal, bfloat16=bfloat16) * weight, bfloat16=bfloat16)


def rotated(x: Given, cos: Given, signed_sin: Given, *, bfloat16: bool = False) -> Floats:
    """Rotary embedding of heads [..., D]: dimension i turns with i + D / 2; the first half of `signed_sin` is −sin."""
    swapped = np.roll(x, x.shape[-1] // 2, axis=-1)
    kept, turned = (rounded(each, bfloat16=bfloat16) for each in (x * cos, swapped * signed_sin))
    return rounded(kept + turned, bfloat16=bfloat16)


def silu_and_multiply(gate_up: Given, *, bfloat16: bool = False) -> Floats:
    """silu(gate) · up, of [..., 2 I] whose first half is the gate."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return rounded(rounded(gate / (1.0 + np.exp(-gate)), bfloat16=bfloat16) * up, bfloat16=bfloat16)


def scores(queries: Given, keys: Given, scale: float) -> Floats:
    """scale · q · k of each query [Q, D] and key [K, D]: [Q, K]."""
    return scale * product(queries, keys)


def capped(scores: Given, cap: float) -> Floats:
    """cap · tanh(score / cap)."""
    return cap * np.tanh(scores.astype(np.float64) / cap)


def visible(scores: Given, positions: Given, first: Given, end: Given) -> Floats:
    """Scores [Q, K], −inf where the position [K] of a key is not in [first, end), both [Q]."""
    seen = (positions[None] >= first[:, None]) & (positions[None] < end[:, None])
    return np.where(seen, scores, -np.inf)


def softmax_weights(scores: Given) -> tuple[Floats, Floats, Floats]:
    """Weights e^(score − maximum) of each row [Q, K], not yet divided by their sum; the maximum [Q]; the sum [Q].

    A row of −inf alone has no weight.
    """
    scores = scores.astype(np.float64)
    maximum = scores.max(axis=-1)
    reference = np.where(np.isneginf(maximum), 0.0, maximum)
    weights = np.exp(scores - reference[:, None])
    return weights, maximum, weights.sum(axis=-1)


def outputs(weights: Given, values: Given) -> Floats:
    """Σ weight · v, of weights [Q, K] and values [K, D]."""
    return weights.astype(np.float64) @ values.astype(np.float64)


def attention(
    queries: Given, keys: Given, values: Given, *, scale: float, window: int | None = None, cap: float | None = None
) -> Floats:
    """Causal attention of the last tokens of one sequence, all heads: [T, H · D].

    Args:
        queries: [T, H, D]; of the last T tokens.
        keys, values: [N, KV, D], of all tokens; head h reads K/V head h // (H / KV).
        window: newest tokens that a token sees, itself included.
        cap: of `capped`.
    """
    tokens, heads = queries.shape[:2]
    length, group = len(keys), heads // keys.shape[1]
    positions, own = np.arange(length), np.arange(length - tokens, length)
    first = np.zeros(tokens, int) if window is None else np.maximum(own - window + 1, 0)
    found = np.empty(queries.shape)
    for head in range(heads):
        each = scores(queries[:, head], keys[:, head // group], scale)
        each = each if cap is None else capped(each, cap)
        weights, _, total = softmax_weights(visible(each, positions, first, own + 1))
        found[:, head] = outputs(weights, values[:, head // group]) / total[:, None]
    return found.reshape(tokens, -1)


def merged(sums: Given, maxima: Given, totals: Given, sink: float | None = None) -> Floats:
    """One softmax from those of several chunks of keys: [D].

    Args:
        sums: [chunks, D], of the outputs, not divided by their totals.
        maxima, totals: [chunks] of their softmax.
        sink: a score that takes its share of the weights and adds nothing.
    """
    maximum = maxima.max() if sink is None else max(maxima.max(), sink)
    factors = np.exp(maxima.astype(np.float64) - maximum)
    total = factors @ totals + (0.0 if sink is None else np.exp(sink - maximum))
    return np.asarray(factors @ sums / total)


def pairs(first: Bits, second: Bits) -> npt.NDArray[np.uint32]:
    """Words of two bfloat16 numbers each, the first in the lower half."""
    return first.astype(np.uint32) | second.astype(np.uint32) << np.uint32(16)


def full_digest(words: Sequence[int], key: int) -> int:
    """The digest of every word of a page (`disaggregation.digest_words`), by integers modulo 2^64."""
    base = total = _mix(key)
    for index, word in enumerate(words):
        x = word ^ (base + index * 0x9E3779B97F4A7C15 & _MASK)
        y = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & _MASK
        total += y ^ y >> 29
    return _mix(total & _MASK)


def sampled_digest(page: Given, rows: Sequence[int], key: int, *, heads: int) -> int:
    """The digest of sampled words of one page.

    Args:
        page: [layers, parts, heads, slots, words of a row], unsigned.
        rows: of each sample, the index of its slot among all slots, in part 0 and the first head that may be read.
        key: of the page.
        heads: how many may be read.
    """
    parts, all_heads, slots, row_words = page.shape[1:]
    by_row = page.reshape(-1, row_words)
    base = total = _mix(key)
    for sample, row in enumerate(rows):
        place = _mix(base + sample * 0x9E3779B97F4A7C15 & _MASK)
        part = (place & 1) * (parts - 1)
        head, word = (place >> 16 & 0xFFFF) * heads >> 16, (place >> 40 & 0xFFFF) * row_words >> 16
        total += _mix(int(by_row[row + (part * all_heads + head) * slots, word]) ^ place)
    return _mix(total & _MASK)


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def first_places(rows: Given) -> npt.NDArray[np.int64]:
    """Where the largest number of each row stands for the first time."""
    return np.argmax(rows, axis=1).astype(np.int64)


def merged_runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs (first source, first target, pages) of pages that are adjacent on both sides."""
    begin = 0
    for index in range(1, len(sources) + 1):
        if index < len(sources):
            step = sources[index] - sources[index - 1], targets[index] - targets[index - 1]
            if step == (1, 1):
                continue
        yield sources[begin], targets[begin], index - begin
        begin = index
