"""Parts that the attention kernels of a CPU share, and the division of a step into tasks.

numba keeps compiled code on disk, keyed by source file and by the constants that a function closes over. Head sizes are
such constants, so LLVM unrolls and vectorizes the loops over head_dim. So is whether scores are capped: kernels for
models without a cap contain no code for it.

`cut_queries` makes the work list of a step, and `group_tasks` finds the tasks that are computed together. Both are
compiled. Unlike the kernels they keep the interpreter lock, because they run at the start of a step (see
`forward.future_map`).

Tasks of one group read the same pages: requests with a common prefix have the same pages for it, as have a token and
the drafts after it. Computed one after the other, each would load these pages from memory again. A group reads the
pages once, tile by tile, until the pages of its members differ; then each member continues alone. The result of a
member is the same, operation for operation, as if it were alone.

A page has one place in any sequence, so members are found by the first page of their chunk; comparing pages gives the
length of their common part.
"""

import math
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload, register_jitable

from tandem_engine.kernels.cpu.jit import compiled, piece
from tandem_engine.kernels.cpu.numbers import bits_of_codes
from tandem_engine.kernels.cpu.pieces import Array, compiled_kernel, inlined, kernel_piece_options
from tandem_engine.kernels.span import Span

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

_NO_SINKS = np.empty(0, np.float32)

_LOG2_E = np.float32(math.log2(math.e))

# exp2 on [-0.5, 0.5] by its Taylor terms ln(2)^n / n!; the first one left out is below 2e-8.
_EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))
_MIN_EXPONENT = np.float32(-126.0)
_MANTISSA_BITS = np.int32(23)
_BFLOAT16_SHIFT, _UPPER_HALF = np.uint32(16), np.uint32(0xFFFF0000)
_JUST_BELOW_HALF, _ONE = np.uint32(0x7FFF), np.uint32(1)
_E4M3, _E5M2 = bits_of_codes(4, has_infinity=False), bits_of_codes(5, has_infinity=True)


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
    """The rows of `out` that belong to the queries of a layer without sinks, from partial results of their chunks."""
    for index in range(queries.shape[0]):
        merge_query(queries[index], partial, out, head_dim, _NO_SINKS)


@inlined
def merge_query(query: Array, partial: Array, out: Array, head_dim: int, sinks: Array) -> None:
    """The row of `out` that belongs to one query. `sinks` [heads] float32, or nothing."""
    _merge(partial[query[FIRST_TASK] : query[END_TASK]], out[query[TOKEN]], head_dim, sinks)


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

    2^(n + f) = poly(f), with n added to its exponent bits: plain loops that vectorize, where calls to
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
def _merge(partial: Array, out: Array, head_dim: int, sinks: Array) -> None:
    """out [heads, D] = the chunks' partial results [chunks, heads, D + 2] as one softmax; sinks take a share."""
    for head in range(out.shape[0]):
        maximum = partial[0, head, head_dim]
        for chunk in range(1, partial.shape[0]):
            maximum = max(maximum, partial[chunk, head, head_dim])
        total = np.float32(0.0)
        if sinks.shape[0] > 0:
            maximum = max(maximum, sinks[head])
            total = np.exp(sinks[head] - maximum)
        out[head, :] = 0.0
        for chunk in range(partial.shape[0]):
            weight = np.exp(partial[chunk, head, head_dim] - maximum)
            total += weight * partial[chunk, head, head_dim + 1]
            for d in range(head_dim):
                out[head, d] += weight * partial[chunk, head, d]
        for d in range(head_dim):
            out[head, d] /= total


def as_float32(rows: Any, wide: Any) -> Any:
    """rows [n, D] as float32: themselves, or what `numbers` has other types' bits widened to, in uint32 scratch.

    Chosen by dtype when a kernel is compiled; only kernels can call it.
    """
    raise NotImplementedError("as_float32 is for compiled code")


# numba requires the same signature, annotations included, of the stub, the chooser and the choices.
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


NO_WINDOW = 1 << 62
"""Longer than any sequence."""


def window_of(span: Span | None) -> int:
    """As kernels take it: the tokens of a window, or those of chunks times −1."""
    if span is None:
        return NO_WINDOW
    return -span.tokens if span.chunked else span.tokens


@inlined
def first_seen(position: int, window: int) -> int:
    """The oldest position that the token at `position` sees."""
    return max(position + 1 - window, 0) if window > 0 else position // -window * -window


def _cut_queries(
    queries: Array, num_short: int, seq_lens: Array, num_extend: int, first_decode: int, window: int
) -> Any:
    """Fill in `queries` [Q, QUERY_COLUMNS] after the first `num_short`, then cut all of them at multiples of `CHUNK`.

    Args:
        queries: of the first `num_short` only the ranges of tasks are missing.
        seq_lens: [B] int64; those from `num_extend` on decode.
        first_decode: index of the first decode's token.
        window: of decodes, see `window_of`.

    Returns the tasks [N, 2], and how many rows of K and of V the queries read together per head.
    """
    for index in range(num_short, queries.shape[0]):
        decode = index - num_short
        length = seq_lens[num_extend + decode]
        queries[index, TOKEN] = first_decode + decode
        queries[index, ROW] = num_extend + decode
        queries[index, LENGTH] = length
        queries[index, FIRST] = first_seen(length - 1, window)
    num_tasks, rows_read = 0, 0
    for index in range(queries.shape[0]):
        first, length = queries[index, FIRST], queries[index, LENGTH]
        queries[index, FIRST_TASK] = num_tasks
        num_tasks += (length + CHUNK - 1) // CHUNK - first // CHUNK
        queries[index, END_TASK] = num_tasks
        rows_read += length - first
    tasks = np.empty((num_tasks, 2), np.int64)
    for index in range(queries.shape[0]):
        first_task = queries[index, FIRST_TASK]
        for task in range(first_task, queries[index, END_TASK]):
            tasks[task, QUERY] = index
            tasks[task, TASK_CHUNK] = queries[index, FIRST] // CHUNK + task - first_task
    return tasks, rows_read


cut_queries = compiled(_cut_queries, nogil=False)


FIRST_MEMBER, END_MEMBER, SHARED_END = range(3)
"""Columns of `groups`: a half-open range of `members`, and the position up to which they read the same pages, which
is 0 of a task that is alone."""

GROUP_COLUMNS = 3

MAX_GROUP = 8
"""Members whose queries and outputs stay in a core's second cache next to a tile."""

GROUPS_PER_THREAD = 2
"""So many at least of tasks that could be one group, for all threads to have some."""


def _shared_end(some: Array, others: Array, begin: int, limit: int, page_size: int, tile: int) -> int:
    """Up to where two rows of the page table are the same from `begin` on: the end of a tile, or of a chunk."""
    first = begin // page_size
    index = first
    while index * page_size < limit and some[index] == others[index]:
        index += 1
    same = min(index * page_size, limit)
    if same < begin + CHUNK:
        same = first * page_size + (same - first * page_size) // tile * tile
    return max(same, begin)


def _listed(group_of: Array, sizes: Array, ends: Array) -> tuple[Array, Array]:
    """`groups` and `members` of the number of each task's group, and of groups' sizes and shared ends."""
    groups = np.empty((sizes.shape[0], GROUP_COLUMNS), np.int64)
    members = np.empty(group_of.shape[0], np.int64)
    places = np.empty(sizes.shape[0], np.int64)
    index, place = 0, 0
    for alone in (False, True):
        for group in range(sizes.shape[0]):
            if (sizes[group] == 1) == alone:
                groups[index, FIRST_MEMBER], groups[index, END_MEMBER] = place, place + sizes[group]
                groups[index, SHARED_END] = 0 if alone else ends[group]
                places[group] = place
                place += sizes[group]
                index += 1
    for task in range(group_of.shape[0]):
        members[places[group_of[task]]] = task
        places[group_of[task]] += 1
    return groups, members


shared_end = piece(_shared_end)
listed = piece(_listed)


def _group_tasks(tasks: Array, queries: Array, page_table: Array, page_size: int, tile: int, threads: int) -> Any:
    """Groups of tasks, those of several first.

    Args:
        tasks, queries, page_table: as `paged_attention.ATTEND` has them.
        tile: tokens between two updates of the softmax, whole pages: where members may part.
        threads: that should have groups to compute.

    Returns `groups` [G, GROUP_COLUMNS] int64 and `members` [N] int64, every task once.
    """
    count = tasks.shape[0]
    largest = MAX_GROUP if threads == 1 else min(MAX_GROUP, count // (GROUPS_PER_THREAD * threads))
    slots = 2 * count + 1
    newest = np.full(slots, -1, np.int64)  # group by the hash of its first page
    pages, leaders, sizes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    ends, group_of = np.empty(count, np.int64), np.empty(count, np.int64)
    num_groups = 0
    for task in range(count):
        query, chunk = queries[tasks[task, QUERY]], tasks[task, TASK_CHUNK]
        begin = chunk * CHUNK
        page_row = page_table[query[ROW]]
        page = page_row[begin // page_size]
        stop = min(begin + CHUNK, query[LENGTH]) if query[FIRST] <= begin else begin
        slot = page % slots
        while newest[slot] >= 0 and pages[newest[slot]] != page:
            slot = (slot + 1) % slots
        group, end = newest[slot], begin
        if group >= 0 and sizes[group] < largest and tasks[leaders[group], TASK_CHUNK] == chunk:
            other_row = page_table[queries[tasks[leaders[group], QUERY], ROW]]
            end = shared_end(page_row, other_row, begin, min(ends[group], stop), page_size, tile)
        # A member that parts so early that the others would continue alone for most of their pages does not join.
        if end > begin and 2 * (end - begin) >= ends[group] - begin:
            sizes[group] += 1
            ends[group] = end
        else:
            group = num_groups
            pages[group], leaders[group], sizes[group], ends[group] = page, task, 1, stop
            if stop > begin:  # a task that no other can join does not precede a group that others can join
                newest[slot] = group
            num_groups += 1
        group_of[task] = group
    return listed(group_of, sizes[:num_groups], ends)


group_tasks = compiled(_group_tasks, nogil=False)
