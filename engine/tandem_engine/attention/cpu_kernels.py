"""Compiled loops of the CPU backend: they store K and V in pages and attend over pages in place.

`attend` computes softmax(q·Kᵀ)·V for queries that each see the first `length` tokens of one sequence.
Nothing is gathered first: every page is read where it lies. Under a sliding window a query has a first
token too, and what lies before it is not read.

How a query is computed
    1. its tokens are cut into chunks of `CHUNK`; a (query, chunk) pair is a task, and tasks run in any order
    2. a task walks its pages tile by tile with an online softmax in float32. A K or V row is loaded once for
       all query heads of its group, and all heads of a page are visited together: one long run of bytes
       comes from memory faster than the same bytes in pieces
    3. the chunks of a query are merged in order, weighted by their maxima

The cut depends on the query's own length and window alone, so its result is the same to the bit with any
number of threads and in any company.

numba keeps compiled code on disk, keyed by source file and by the constants a function closes over. Head
sizes are such constants: LLVM then unrolls and vectorises the loops over head_dim. So is whether scores are
capped: kernels for models that do not cap hold no trace of it.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core import types
from numba.extending import overload

from tandem_engine.attention.cpu_numbers import bits_of_codes
from tandem_engine.compiled import callback, compiled

CHUNK = 512
"""Tokens of one task: long enough to hide the merge, short enough that one long context feeds all threads."""

TILE = 32
"""Tokens per softmax update, rounded up to whole pages."""

TOKEN, ROW, FIRST, LENGTH, FIRST_TASK, END_TASK = range(6)
"""Columns of `queries`: index into q, row of the page table, the half-open range [FIRST, LENGTH) of tokens it
sees, its half-open range of tasks."""

QUERY_COLUMNS = 6

QUERY, TASK_CHUNK = range(2)
"""Columns of `tasks`."""

STATISTICS = 2
"""A partial result is head_dim values, then the maximum score and the sum of weights relative to it."""

Array = npt.NDArray[Any]
AttendKernel = Callable[[Array, int, Array, np.float32, np.float32, Array, Array, Array, Array, Array], None]

# Sums may be reordered and contracted, else a dot product stays scalar. NaN and inf keep their meaning.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}
_LOG2_E = np.float32(math.log2(math.e))
# exp2 on [-0.5, 0.5] by its Taylor terms ln(2)^n / n!; the first one left out is below 2e-8.
_EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))
_MIN_EXPONENT = np.float32(-126.0)
_MANTISSA_BITS = np.int32(23)
_BFLOAT16_SHIFT = np.uint32(16)
_E4M3, _E5M2 = bits_of_codes(torch.float8_e4m3fn), bits_of_codes(torch.float8_e5m2)


def compiled_kernel(function: Callable[..., Any], **extra: bool) -> Any:
    """A kernel, which Python code may call."""
    return compiled(function, **_OPTIONS, **extra)


def compiled_callback(function: Callable[..., Any], signature: Any) -> Any:
    """A kernel that other compiled code may call by its `address`, on threads that know nothing of Python."""
    return callback(function, signature, **_OPTIONS)


def inlined(function: Callable[..., Any]) -> Any:
    """A piece of a kernel, expanded where it is called so that the caller's constants reach its loops."""
    return numba.njit(**kernel_piece_options())(function)


def compiled_piece(function: Callable[..., Any]) -> Any:
    """A piece of a kernel that is large enough to be called."""
    return numba.njit(nogil=True, **_OPTIONS)(function)


def kernel_piece_options() -> dict[str, Any]:
    """For an `overload` that is to be such a piece."""
    return {**_OPTIONS, "nogil": True, "forceinline": True}


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


def build_attend_serial(head_dim: int, group: int, *, capped: bool) -> AttendKernel:
    """`attend` on the calling thread, for heads of `head_dim` and `group` query heads per K/V head.

    With `capped` a score s becomes soft_cap · tanh(s / soft_cap).

    The kernel's arguments:
        pages       [page, layer, 2, KV, slot, D] float32, or other types as `cpu_numbers` has them
        layer
        q           [T, KV * group, D] float32
        scale       float32 factor of the scores
        soft_cap    float32, read when `capped`
        page_table  [B, P] int32
        tasks       [N, 2] int64, columns `QUERY`, `TASK_CHUNK`
        queries     [Q, QUERY_COLUMNS] int64, columns `TOKEN` … `END_TASK`
        partial     [N, KV * group, D + STATISTICS] float32, scratch
        out         [T, KV * group, D] float32; rows of the queries' tokens are written
    """

    def attend_serial(
        pages: Array,
        layer: int,
        q: Array,
        scale: np.float32,
        soft_cap: np.float32,
        page_table: Array,
        tasks: Array,
        queries: Array,
        partial: Array,
        out: Array,
    ) -> None:
        for task in range(tasks.shape[0]):
            attend_task(
                pages,
                layer,
                q,
                scale,
                soft_cap,
                page_table,
                tasks[task],
                0,
                pages.shape[3],
                queries,
                partial[task],
                head_dim,
                group,
                capped,
            )
        merge_queries(queries, partial, out, head_dim)

    return compiled_kernel(attend_serial)  # type: ignore[no-any-return]


def build_attend_parallel(head_dim: int, group: int, *, capped: bool) -> AttendKernel:
    """`attend` on numba's threads, same arguments and same bits as `build_attend_serial`.

    A function of its own: numba's cache does not tell a parallel build of a function from a serial one.
    """

    def attend_parallel(
        pages: Array,
        layer: int,
        q: Array,
        scale: np.float32,
        soft_cap: np.float32,
        page_table: Array,
        tasks: Array,
        queries: Array,
        partial: Array,
        out: Array,
    ) -> None:
        for task in numba.prange(tasks.shape[0]):
            attend_task(
                pages,
                layer,
                q,
                scale,
                soft_cap,
                page_table,
                tasks[task],
                0,
                pages.shape[3],
                queries,
                partial[task],
                head_dim,
                group,
                capped,
            )
        merge_queries(queries, partial, out, head_dim)

    return compiled_kernel(attend_parallel, parallel=True)  # type: ignore[no-any-return]


@inlined
def attend_task(
    pages: Array,
    layer: int,
    q: Array,
    scale: np.float32,
    soft_cap: np.float32,
    page_table: Array,
    task: Array,
    first_head: int,
    end_head: int,
    queries: Array,
    partial: Array,
    head_dim: int,
    group: int,
    capped: bool,
) -> None:
    """partial [heads, D + 2] = a query's attention over one chunk of its tokens.

    Only query heads of the K/V heads [first_head, end_head): no head depends on which others are computed with it.
    """
    query = queries[task[QUERY]]
    begin = task[TASK_CHUNK] * CHUNK
    start, stop = max(begin, query[FIRST]), min(begin + CHUNK, query[LENGTH])
    row, heads = page_table[query[ROW]], q[query[TOKEN]]
    _attend_chunk(
        pages, layer, heads, scale, soft_cap, row, start, stop, first_head, end_head, partial, head_dim, group, capped
    )


@inlined
def merge_queries(queries: Array, partial: Array, out: Array, head_dim: int) -> None:
    """The rows of `out` that belong to the queries, from the partial results of their chunks."""
    for index in range(queries.shape[0]):
        query = queries[index]
        _merge(partial[query[FIRST_TASK] : query[END_TASK]], out[query[TOKEN]], head_dim)


@inlined
def _attend_chunk(
    pages: Array,
    layer: int,
    q: Array,
    scale: np.float32,
    soft_cap: np.float32,
    page_row: Array,
    start: int,
    stop: int,
    first_head: int,
    end_head: int,
    partial: Array,
    head_dim: int,
    group: int,
    capped: bool,
) -> None:
    """partial = attention of q [heads, D], those of some K/V heads, over tokens [start, stop) of a sequence."""
    page_size = pages.shape[4]
    tile_len = (TILE + page_size - 1) // page_size * page_size
    heads = q.shape[0]
    first, last = first_head * group, end_head * group
    scores = np.empty((heads, tile_len), np.float32)
    exponents = np.empty(tile_len, np.int32)
    decay = np.empty(tile_len if capped else 0, np.float32)
    wide = np.empty((page_size, head_dim), np.uint32)
    partial[first:last, :head_dim] = 0.0
    partial[first:last, head_dim] = -np.inf
    partial[first:last, head_dim + 1] = 0.0
    # A page may straddle two chunks: its slots before `start` belong to the chunk before.
    while start < stop:
        end = min(stop, start // page_size * page_size + tile_len)
        _score_tile(pages, layer, q, scale, page_row, start, end, first_head, end_head, scores, wide, head_dim, group)
        for head in range(first, last):
            if capped:
                _cap(scores[head], decay, exponents, end - start, soft_cap)
            _update_softmax(scores[head], exponents, end - start, partial[head], head_dim)
        _add_tile(pages, layer, scores, page_row, start, end, first_head, end_head, partial, wide, head_dim, group)
        start = end


@inlined
def _score_tile(
    pages: Array,
    layer: int,
    q: Array,
    scale: np.float32,
    page_row: Array,
    start: int,
    end: int,
    first_head: int,
    end_head: int,
    scores: Array,
    wide: Array,
    head_dim: int,
    group: int,
) -> None:
    """scores[head, token − start] = q[head] · K[token] · scale for tokens [start, end)."""
    page_size = pages.shape[4]
    for index in range(start // page_size, (end + page_size - 1) // page_size):
        first = max(start, index * page_size)
        last = min(end, (index + 1) * page_size)
        for kv_head in range(first_head, end_head):
            block = pages[page_row[index], layer, 0, kv_head]
            keys = as_float32(block[first - index * page_size : last - index * page_size], wide)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for slot in range(last - first):
                    total = np.float32(0.0)
                    for d in range(head_dim):
                        total += q[head, d] * keys[slot, d]
                    scores[head, first - start + slot] = total * scale


@inlined
def _cap(scores: Array, decay: Array, exponents: Array, count: int, soft_cap: float) -> None:
    """scores[:count] = soft_cap · tanh(scores / soft_cap), by tanh |x| = (1 − e^(−2|x|)) / (1 + e^(−2|x|))."""
    for i in range(count):
        decay[i] = np.float32(-2.0) * np.abs(scores[i]) / soft_cap
    exp_shifted(decay, exponents, count, np.float32(0.0))
    for i in range(count):
        bounded = soft_cap * (np.float32(1.0) - decay[i]) / (np.float32(1.0) + decay[i])
        scores[i] = -bounded if scores[i] < 0 else bounded


@inlined
def _update_softmax(scores: Array, exponents: Array, count: int, partial: Array, head_dim: int) -> None:
    """Turn scores into weights relative to the new maximum, and rescale what the old one weighted."""
    old = partial[head_dim]
    maximum = old
    for i in range(count):
        maximum = max(maximum, scores[i])
    exp_shifted(scores, exponents, count, maximum)
    total = np.float32(0.0)
    for i in range(count):
        total += scores[i]
    if maximum > old:
        shrink = np.exp(old - maximum)
        for d in range(head_dim):
            partial[d] *= shrink
        partial[head_dim] = maximum
        partial[head_dim + 1] *= shrink
    partial[head_dim + 1] += total


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
def _add_tile(
    pages: Array,
    layer: int,
    weights: Array,
    page_row: Array,
    start: int,
    end: int,
    first_head: int,
    end_head: int,
    partial: Array,
    wide: Array,
    head_dim: int,
    group: int,
) -> None:
    """partial[head] += Σ weights[head, token − start] · V[token] for tokens [start, end)."""
    page_size = pages.shape[4]
    for index in range(start // page_size, (end + page_size - 1) // page_size):
        first = max(start, index * page_size)
        last = min(end, (index + 1) * page_size)
        for kv_head in range(first_head, end_head):
            block = pages[page_row[index], layer, 1, kv_head]
            values = as_float32(block[first - index * page_size : last - index * page_size], wide)
            for head in range(kv_head * group, (kv_head + 1) * group):
                _add_weighted(partial[head], weights[head, first - start :], values, last - first, head_dim)


@inlined
def _add_weighted(out: Array, weights: Array, values: Array, count: int, head_dim: int) -> None:
    """out += Σ weights[slot] · values[slot], four rows at a time: each sum waits for the one before."""
    whole = count // 4 * 4
    for slot in range(0, whole, 4):
        w0, w1, w2, w3 = weights[slot], weights[slot + 1], weights[slot + 2], weights[slot + 3]
        for d in range(head_dim):
            out[d] += (w0 * values[slot, d] + w1 * values[slot + 1, d]) + (
                w2 * values[slot + 2, d] + w3 * values[slot + 3, d]
            )
    for slot in range(whole, count):
        w0 = weights[slot]
        for d in range(head_dim):
            out[d] += w0 * values[slot, d]


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
