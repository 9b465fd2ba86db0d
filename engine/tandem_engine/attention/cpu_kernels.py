"""Compiled pieces of the CPU backend's kernels, and how the paged kernel's work is cut (`paged_kernel`).

numba keeps compiled code on disk, keyed by source file and by the constants a function closes over. Head
sizes are such constants: LLVM then unrolls and vectorises the loops over head_dim. So is whether scores are
capped: kernels for models that do not cap hold no trace of it.
"""

import math
from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import overload, register_jitable

from tandem_engine.attention.cpu_numbers import bits_of_codes
from tandem_engine.attention.pieces import Array, compiled_kernel, inlined, kernel_piece_options

CHUNK = 512
"""Tokens of one task: long enough to hide the merge, short enough that one long context feeds all threads."""

TILE = 64
"""Tokens for each update of the softmax, rounded up to whole pages."""

TOKEN, ROW, FIRST, LENGTH, FIRST_TASK, END_TASK = range(6)
"""Columns of `queries`: index into q, row of the page table, the half-open range [FIRST, LENGTH) of tokens it
sees, its half-open range of tasks."""

QUERY_COLUMNS = 6

QUERY, TASK_CHUNK = range(2)
"""Columns of `tasks`."""

STATISTICS = 2
"""A partial result is head_dim values, then the maximum score and the sum of weights relative to it."""

_LOG2_E = np.float32(math.log2(math.e))
# exp2 on [-0.5, 0.5] by its Taylor terms ln(2)^n / n!; the first one left out is below 2e-8.
_EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))
_MIN_EXPONENT = np.float32(-126.0)
_MANTISSA_BITS = np.int32(23)
_BFLOAT16_SHIFT, _UPPER_HALF = np.uint32(16), np.uint32(0xFFFF0000)
_JUST_BELOW_HALF, _ONE = np.uint32(0x7FFF), np.uint32(1)
_E4M3, _E5M2 = bits_of_codes(torch.float8_e4m3fn), bits_of_codes(torch.float8_e5m2)


@register_jitable  # type: ignore[untyped-decorator]
def pages_of_tile(page_size: int) -> int:
    """As many as hold `TILE` tokens."""
    return (TILE + page_size - 1) // page_size


@compiled_kernel
def store(pages: Array, layer: int, k: Array, v: Array, slots: Array) -> None:
    """Write k and v [T, KV, D], of the pages' dtype, to int64 slots [T] of [page, layer, 2, KV, slot, D]."""
    page_size = pages.shape[4]
    for token in range(k.shape[0]):
        page, slot = divmod(slots[token], page_size)
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                pages[page, layer, 0, head, slot, d] = k[token, head, d]
                pages[page, layer, 1, head, slot, d] = v[token, head, d]


@inlined
def merge_queries(queries: Array, partial: Array, out: Array, head_dim: int) -> None:
    """The rows of `out` that belong to the queries, from the partial results of their chunks."""
    for index in range(queries.shape[0]):
        merge_query(queries[index], partial, out, head_dim)


@inlined
def merge_query(query: Array, partial: Array, out: Array, head_dim: int) -> None:
    """The row of `out` that belongs to one query."""
    _merge(partial[query[FIRST_TASK] : query[END_TASK]], out[query[TOKEN]], head_dim)


@inlined
def halved(bits: np.uint32) -> np.uint32:
    """float32 bits of the nearest bfloat16, ties to even."""
    return np.uint32(bits + _JUST_BELOW_HALF + (bits >> _BFLOAT16_SHIFT & _ONE)) & _UPPER_HALF


@inlined
def pair_up_queries(q: Array, words: Array) -> None:
    """Words [heads, D / 2] of pairs of bfloat16 from q [heads, D]."""
    for head in range(words.shape[0]):
        bits = q[head].view(np.uint32)
        for pair in range(words.shape[1]):
            words[head, pair] = halved(bits[2 * pair]) >> _BFLOAT16_SHIFT | halved(bits[2 * pair + 1])


@inlined
def cap_scores(scores: Array, decay: Array, exponents: Array, count: int, soft_cap: float) -> None:
    """scores[:count] = soft_cap · tanh(scores / soft_cap), by tanh |x| = (1 − e^(−2|x|)) / (1 + e^(−2|x|))."""
    for i in range(count):
        decay[i] = np.float32(-2.0) * np.abs(scores[i]) / soft_cap
    exp_shifted(decay, exponents, count, np.float32(0.0))
    for i in range(count):
        bounded = soft_cap * (np.float32(1.0) - decay[i]) / (np.float32(1.0) + decay[i])
        scores[i] = -bounded if scores[i] < 0 else bounded


@inlined
def exp_shifted(row: Array, exponents: Array, count: int, maximum: float) -> None:
    """row[:count] = exp(row[:count] − maximum).

    2^(n + f) = poly(f), with n added to its exponent bits: plain loops that vectorise, where calls to
    libm's exp would not.
    """
    c0, c1, c2, c3, c4, c5, c6 = _EXP2
    for i in range(count):
        power = (row[i] - maximum) * _LOG2_E
        power = _MIN_EXPONENT if power < _MIN_EXPONENT else power  # not `max`, which would swallow NaN
        whole = np.floor(power + np.float32(0.5))
        f = power - whole
        row[i] = c0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
        exponents[i] = np.int32(whole) << _MANTISSA_BITS
    bits = row.view(np.int32)
    for i in range(count):
        bits[i] += exponents[i]


@inlined
def _merge(partial: Array, out: Array, head_dim: int) -> None:
    """out [heads, D] = the chunks' partial results [chunks, heads, D + 2] as one softmax."""
    for head in range(out.shape[0]):
        maximum = partial[0, head, head_dim]
        for chunk in range(1, partial.shape[0]):
            maximum = max(maximum, partial[chunk, head, head_dim])
        total = np.float32(0.0)
        out[head, :] = 0.0
        for chunk in range(partial.shape[0]):
            weight = np.exp(partial[chunk, head, head_dim] - maximum)
            total += weight * partial[chunk, head, head_dim + 1]
            for d in range(head_dim):
                out[head, d] += weight * partial[chunk, head, d]
        for d in range(head_dim):
            out[head, d] /= total


def as_float32(rows: Any, wide: Any) -> Any:
    """rows [n, D] as float32: themselves, or what `cpu_numbers` has other types' bits widened to, in uint32 scratch.

    Chosen by dtype when a kernel is compiled; only kernels can call it.
    """
    raise NotImplementedError("as_float32 is for compiled code")


# numba wants the very same signature, annotations included, of the stub, the chooser and the choices.
def _keep(rows: Any, wide: Any) -> Any:  # noqa: ARG001
    return rows


def _widen(rows: Any, wide: Any) -> Any:
    for slot in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            wide[slot, d] = np.uint32(rows[slot, d]) << _BFLOAT16_SHIFT
    return wide.view(np.float32)


def _widen_e4m3(rows: Any, wide: Any) -> Any:
    for slot in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            wide[slot, d] = _E4M3[rows[slot, d]]
    return wide.view(np.float32)


def _widen_e5m2(rows: Any, wide: Any) -> Any:
    for slot in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            wide[slot, d] = _E5M2[np.uint8(rows[slot, d])]
    return wide.view(np.float32)


_WIDENERS = {types.float32: _keep, types.uint16: _widen, types.uint8: _widen_e4m3, types.int8: _widen_e5m2}


@overload(as_float32, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _as_float32_of_dtype(rows: Any, wide: Any) -> Any:  # noqa: ARG001
    return _WIDENERS[rows.dtype]
