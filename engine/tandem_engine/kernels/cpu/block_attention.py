"""The attention kernel for runs of tokens: blocks of queries against blocks of keys, as matrix products.

    queries of one K/V head, group by group, adjacent in panels             Qᵀ   [D, PANEL]
    for each block of KEYS keys, copied from its pages
        scores      K · Qᵀ                     K broadcast, panel by panel   S    [keys, PANEL]
        weights     softmax so far             `softmax`                     S
        output      Vᵀ · S on top of the rest  V broadcast                   Oᵀ   [D, PANEL]

Queries are the lanes, so only Q and O, which are small, are transposed; all query heads of a K/V head share its keys;
maxima and sums never cross lanes. K and V are copied by whole rows: copying number by number took as long as the
bfloat16 products themselves.

Over bfloat16 pages, on a CPU that multiplies pairs (`kernels.cpu.vectors`), both products take pairs: of dimensions of
K and Q, of keys in V and S. Weights are then rounded to bfloat16, as values are.

A query's result depends on its own keys alone, to the bit: lanes are independent, blocks end at multiples of `KEYS`,
pairs begin at even positions, and a key that a query does not see adds exact zeros. So it does not depend on how a
prompt is cut into chunks, on how the queries are cut into tasks, or on the number of threads.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.kernels.cpu.attention_work import as_float32, first_seen, halved
from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.pieces import Array, compiled_callback, inlined
from tandem_engine.kernels.cpu.softmax import bound, hide, pair_up, weigh
from tandem_engine.kernels.cpu.threads import pointer, take
from tandem_engine.kernels.cpu.vectors import (
    FLOAT_BYTES,
    MULTIPLIES_PAIRS,
    PANEL,
    copy_bytes,
    pair_rows,
    product,
    product_of_pairs,
)

_HALF_BITS = np.uint32(16)

_LN_2 = np.float32(math.log(2))

_PAIRED_BYTES = 2
"""Of a number of a pair."""


@inlined
def place_query_pairs(q: Array, kv_head: int, group: int, begin: int, end: int, queries: Array) -> None:
    """q [T, heads · D], unscaled, to pairs of dimensions: words in the first D / 2 rows of each panel of `queries`."""
    head_dim = queries.shape[1]
    words = queries.view(np.uint32)
    words[:] = 0
    lane = 0
    for token in range(begin, end):
        for head in range(kv_head * group, (kv_head + 1) * group):
            panel, column = lane // PANEL, lane % PANEL
            bits = q[token, head * head_dim : (head + 1) * head_dim].view(np.uint32)
            for pair in range(head_dim // 2):
                words[panel, pair, column] = halved(bits[2 * pair]) >> _HALF_BITS | halved(bits[2 * pair + 1])
            lane += 1


@inlined
def copy_key_pairs(pages: Array, layer: int, kv_head: int, page_row: Array, first: int, count: int, out: Array) -> None:
    """Pairs of dimensions of K of `count` tokens from `first` on to `out`, dense rows of D / 2 words."""
    page_size, head_dim = pages.shape[4], out.shape[1]
    words, done = out.ctypes.data, 0
    while done < count:
        index, slot = divmod(first + done, page_size)
        rows = min(page_size - slot, count - done)
        keys = pages[page_row[index], layer, 0, kv_head, slot:]
        copy_bytes(keys.ctypes.data, words + done * head_dim * _PAIRED_BYTES, rows * head_dim * _PAIRED_BYTES)
        done += rows


@inlined
def copy_value_pairs(
    pages: Array, layer: int, kv_head: int, page_row: Array, first: int, count: int, out: Array
) -> None:
    """Pairs of V of `count` tokens from `first` on to the first rows of `out`: an even position and the next."""
    page_size, head_dim = pages.shape[4], out.shape[1]
    index, slot = divmod(first, page_size)
    for pair in range((count + 1) // 2):
        even = pages[page_row[index], layer, 1, kv_head, slot].ctypes.data
        slot += 1
        if slot == page_size:
            index, slot = index + 1, 0
        # The last one of an odd count is a pair with itself, whose second weight is 0.
        odd = pages[page_row[index], layer, 1, kv_head, slot].ctypes.data if 2 * pair + 1 < count else even
        slot += 1
        if slot == page_size:
            index, slot = index + 1, 0
        pair_rows(even, odd, out[pair].ctypes.data, head_dim)


@inlined
def place_queries(q: Array, kv_head: int, group: int, begin: int, end: int, scale: np.float32, queries: Array) -> None:
    """q [T, heads · D] to `queries` [panels, D, PANEL], scaled: tokens in order, each one's heads together."""
    head_dim = queries.shape[1]
    queries[:] = 0.0
    lane = 0
    for token in range(begin, end):
        for head in range(kv_head * group, (kv_head + 1) * group):
            panel, column = lane // PANEL, lane % PANEL
            for d in range(head_dim):
                queries[panel, d, column] = q[token, head * head_dim + d] * scale
            lane += 1


@inlined
def place_bounds(position: int, group: int, begin: int, end: int, window: int, bounds: Array) -> None:
    """The positions that each lane sees, [2, panels, PANEL]: from the first row on up to, not including, the second."""
    bounds[0] = 0
    bounds[1] = np.iinfo(np.int32).max
    for lane in range((end - begin) * group):
        place = position + begin + lane // group
        bounds[0, lane // PANEL, lane % PANEL] = first_seen(place, window)
        bounds[1, lane // PANEL, lane % PANEL] = place + 1


@inlined
def copy_rows(
    pages: Array, layer: int, side: int, kv_head: int, page_row: Array, first: int, count: int, wide: Array, out: Array
) -> None:
    """out[:count] = K or V of `count` tokens from `first` on, of one head, as float32."""
    page_size = pages.shape[4]
    done = 0
    while done < count:
        index, slot = divmod(first + done, page_size)
        stop = min(page_size, slot + count - done)
        rows = as_float32(pages[page_row[index], layer, side, kv_head, slot:stop], wide)
        copy_bytes(rows.ctypes.data, out[done].ctypes.data, (stop - slot) * out.shape[1] * FLOAT_BYTES)
        done += stop - slot


@inlined
def place_outputs(outputs: Array, totals: Array, kv_head: int, group: int, begin: int, end: int, out: Array) -> None:
    """out [T, heads · D] = the sums in `outputs` over their `totals`; the inverse of `place_queries`."""
    head_dim = outputs.shape[1]
    lane = 0
    for token in range(begin, end):
        for head in range(kv_head * group, (kv_head + 1) * group):
            panel, column = lane // PANEL, lane % PANEL
            share = np.float32(1.0) / totals[panel, column]
            for d in range(head_dim):
                out[token, head * head_dim + d] = outputs[panel, d, column] * share
            lane += 1


@inlined
def add_sinks(
    totals: Array, maxima: Array, kv_head: int, group: int, begin: int, end: int, scale: np.float32, sinks: Array
) -> None:
    """Add the weight of each head's sink [heads] to the totals of its lanes.

    A weight counts from the lane's maximum, whose unit is 1 / `scale` powers of two. A sink so far above it that the
    weight is infinite leaves outputs of 0, which is what they are to 38 digits.
    """
    lane = 0
    for _ in range(begin, end):
        for head in range(kv_head * group, (kv_head + 1) * group):
            panel, column = lane // PANEL, lane % PANEL
            totals[panel, column] += np.exp(sinks[head] - maxima[panel, column] * scale * _LN_2)
            lane += 1


types: Any = numba_types

KEYS = 64
"""Keys of a block: their scores with one panel, 8 KiB, stay in a core's first cache, as do K and V."""

START, ROW, POSITION = range(3)
"""Columns of `sequences`: the first token's index into q, row of the page table, position of the first token."""

SEQUENCE_COLUMNS = 3

SEQUENCE, KV_HEAD, BEGIN, END = range(4)
"""Columns of `tasks`: queries [BEGIN, END), counted from the first token of a sequence, of the heads of KV_HEAD."""

TASK_COLUMNS = 4

WORK = np.dtype(
    [
        (name, np.int64)
        for name in (
            "next_task",
            "num_tasks",
            "tasks",
            "sequences",
            "page_table",
            "table_width",
            "pages",
            "num_layers",
            "layer",
            "num_kv_heads",
            "page_size",
            "head_dim",
            "group",
            "q",
            "out",
            "window",
            "panels",
            "sinks",
        )
    ]
    + [("scale", np.float32), ("soft_cap", np.float32)]
)
"""What the kernel is given, one record. Arrays are addresses:

    tasks       [num_tasks, TASK_COLUMNS] int64
    sequences   [S, SEQUENCE_COLUMNS] int64
    page_table  [B, table_width] int32
    pages       [page, num_layers, 2, num_kv_heads, page_size, head_dim] float32, or others as `numbers` has them
    q, out      [T, num_kv_heads · group, head_dim] float32, dense; of `out` the tasks' queries are written

`next_task` counts what has been taken, from 0. `window`: which tokens a query sees, as `window_of` has it. `panels`
holds the queries of any task. `scale` has the factor log2 e where `soft_cap` is 0, else the factor 1 / soft_cap.
`sinks` is the address of float32 [heads], or 0 for a layer without sinks.
"""


class Scratch(NamedTuple):
    """What a thread works on; P panels of queries, all float32 but `bounds` and `wide`.

    Where pairs are multiplied, `queries`, `keys` and `values` hold those in the first half of what they are here.
    """

    queries: Array
    """[P, D, PANEL] Qᵀ"""
    bounds: Array
    """[2, P, PANEL] int32, the positions that each query sees: from the first on up to the second, exclusive."""
    keys: Array
    """[KEYS, D]"""
    values: Array
    """[KEYS, D]"""
    wide: Array
    """[page_size, D] uint32, numbers being widened"""
    scores: Array
    """[KEYS, PANEL] S"""
    maxima: Array
    """[P, PANEL] of the scores so far"""
    totals: Array
    """[P, PANEL] of the weights so far"""
    factors: Array
    """[PANEL], see `weigh`"""
    outputs: Array
    """[P, D, PANEL] Oᵀ, yet to be divided by the totals"""


BlockKernel = Any
"""A compiled callback of the address of a `WORK` record; takes tasks until none is left."""


@kept
def build_block_kernel(pages_dtype: np.dtype[Any]) -> BlockKernel:
    """The kernel for pages of float32, or of others as `numbers` has them. A head_dim is even."""
    number = numba.from_dtype(pages_dtype)
    # numba leaves out what it compiles for None, which takes as long as the rest.
    pairs = True if MULTIPLIES_PAIRS and pages_dtype == np.uint16 else None

    def attend_blocks(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        pages = numba.carray(
            pointer(work.pages, number), (1, work.num_layers, 2, work.num_kv_heads, work.page_size, work.head_dim)
        )
        tasks = numba.carray(pointer(work.tasks, types.int64), (work.num_tasks, TASK_COLUMNS))
        scratch = Scratch(
            queries=np.empty((work.panels, work.head_dim, PANEL), np.float32),
            bounds=np.empty((2, work.panels, PANEL), np.int32),
            keys=np.empty((KEYS, work.head_dim), np.float32),
            values=np.empty((KEYS, work.head_dim), np.float32),
            wide=np.empty((work.page_size, work.head_dim), np.uint32),
            scores=np.empty((KEYS, PANEL), np.float32),
            maxima=np.empty((work.panels, PANEL), np.float32),
            totals=np.empty((work.panels, PANEL), np.float32),
            factors=np.empty(PANEL, np.float32),
            outputs=np.empty((work.panels, work.head_dim, PANEL), np.float32),
        )
        task = take(data)
        while task < work.num_tasks:
            _attend_task(work, pages, tasks[task], scratch, pairs)
            task = take(data)

    signature = types.void(types.CPointer(numba.from_dtype(WORK)))
    return compiled_callback(attend_blocks, signature)


@inlined
def _attend_task(work: Any, pages: Array, task: Array, scratch: Scratch, pairs: bool | None) -> None:
    """The queries of one task, from q to out."""
    kv_head, begin, end, group = task[KV_HEAD], task[BEGIN], task[END], work.group
    sequences = numba.carray(pointer(work.sequences, types.int64), (1, SEQUENCE_COLUMNS))
    sequence = sequences[task[SEQUENCE]]
    page_row = numba.carray(pointer(work.page_table, types.int32), (1, work.table_width))[sequence[ROW]]
    width = work.num_kv_heads * group * work.head_dim
    offset = sequence[START] * width * FLOAT_BYTES
    q = numba.carray(pointer(work.q + offset, types.float32), (1, width))
    out = numba.carray(pointer(work.out + offset, types.float32), (1, width))
    if pairs is not None:
        place_query_pairs(q, kv_head, group, begin, end, scratch.queries)
    else:
        place_queries(q, kv_head, group, begin, end, work.scale, scratch.queries)
    place_bounds(sequence[POSITION], group, begin, end, work.window, scratch.bounds)
    scratch.outputs[:] = 0.0
    scratch.maxima[:] = -np.inf
    scratch.totals[:] = 0.0
    key, last = first_seen(sequence[POSITION] + begin, work.window) // 2 * 2, sequence[POSITION] + end
    while key < last:
        count = min(key // KEYS * KEYS + KEYS, last) - key
        if pairs is not None:
            copy_key_pairs(pages, work.layer, kv_head, page_row, key, count, scratch.keys)
            copy_value_pairs(pages, work.layer, kv_head, page_row, key, count, scratch.values)
        else:
            copy_rows(pages, work.layer, 0, kv_head, page_row, key, count, scratch.wide, scratch.keys)
            copy_rows(pages, work.layer, 1, kv_head, page_row, key, count, scratch.wide, scratch.values)
        scale = work.scale if pairs is not None else np.float32(1.0)
        for panel in range(((end - begin) * group + PANEL - 1) // PANEL):
            # Its last token sees no key after itself.
            oldest = sequence[POSITION] + begin + panel * PANEL // group
            newest = sequence[POSITION] + min(begin + ((panel + 1) * PANEL - 1) // group, end - 1)
            seen = min(count, newest + 1 - key)
            if seen > 0:
                hidden = oldest + 1 < key + seen or first_seen(newest, work.window) > key
                _attend_panel(panel, key, seen, hidden, scale, work.soft_cap, scratch, pairs)
        key += count
    if work.sinks != 0:
        sinks = numba.carray(pointer(work.sinks, types.float32), (work.num_kv_heads * group,))
        unit = work.scale if pairs is not None and work.soft_cap == 0 else np.float32(1.0)
        add_sinks(scratch.totals, scratch.maxima, kv_head, group, begin, end, unit, sinks)
    place_outputs(scratch.outputs, scratch.totals, kv_head, group, begin, end, out)


@inlined
def _attend_panel(
    panel: int,
    key: int,
    count: int,
    hidden: bool,
    scale: np.float32,
    soft_cap: np.float32,
    scratch: Scratch,
    pairs: bool | None,
) -> None:
    """One panel of queries against the block of `count` keys from position `key` on, of which some may be `hidden`."""
    head_dim = scratch.keys.shape[1]
    keys, values, scores = scratch.keys.ctypes.data, scratch.values.ctypes.data, scratch.scores.ctypes.data
    queries, outputs = scratch.queries[panel].ctypes.data, scratch.outputs[panel].ctypes.data
    maxima, totals = scratch.maxima[panel].ctypes.data, scratch.totals[panel].ctypes.data
    firsts, ends = scratch.bounds[0, panel], scratch.bounds[1, panel]
    factors = scratch.factors.ctypes.data
    if pairs is not None:
        product_of_pairs(keys, head_dim // 2, 1, queries, scores, PANEL, count, head_dim // 2, 0)
    else:
        product(keys, head_dim, 1, queries, scores, PANEL, count, head_dim, 0)
    if soft_cap > 0:
        bound(scores, count, soft_cap, scale)
    if hidden:
        hide(scores, count, key, firsts.ctypes.data, ends.ctypes.data)
    weigh(scores, count, maxima, totals, factors, np.float32(1.0) if soft_cap > 0 else scale)
    if pairs is not None:
        if count % 2 == 1:
            scratch.scores[count] = 0.0
        pair_up(scores, count)
        product_of_pairs(values, 1, head_dim, scores, outputs, PANEL, head_dim, (count + 1) // 2, factors)
    else:
        product(values, 1, head_dim, scores, outputs, PANEL, head_dim, count, factors)
