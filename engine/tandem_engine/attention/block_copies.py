"""Queries, keys and values on their way between pages and the panels and blocks of `cpu_blocks`.

K and V go by whole rows: number by number, copies took as long as the products of bfloat16 that they were for.
"""

import numpy as np

from tandem_engine.attention.cpu_kernels import as_float32, halved
from tandem_engine.attention.pieces import Array, inlined
from tandem_engine.attention.vectors import FLOAT_BYTES, PANEL, copy_bytes, pair_rows

_HALF_BITS = np.uint32(16)
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
        bounds[0, lane // PANEL, lane % PANEL] = max(place + 1 - window, 0)
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
