"""Products of a step (`kernels.cpu.decoder_step`): x Wᵀ by panels of W, and what adapters add to rows of them.

    low = s · x Aᵀ      `shrink`, in float32, rounded to a number of the model's dtype: a phase before the product
    delta = low Bᵀ      `expand`, in float32: the next phase
    x Wᵀ + delta        `add_to_panel`, while a panel of the product is in the first cache

A step reads each A and each B once, and they come from memory faster than they are multiplied only if they are read
from the first byte to the last: one adapter after the other, one row after the other. So `expand` adds to a range of
outputs in the first cache for each row of Bᵀ; registers would hold sums of few outputs, a piece of each row.

Rows without an adapter are neither read nor written. Every sum is over its inputs in order, whatever rows a step has,
so a row has the same bits in any batch. A and B are read where the adapter holds them (`model.adapters.weights`), as
float32 or bfloat16.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.core import types as numba_types

from tandem_engine.kernels.cpu.gemm import OUTPUTS, multiply_panel
from tandem_engine.kernels.cpu.numbers import rounded, widened
from tandem_engine.kernels.cpu.pieces import Array, compiled_piece, inlined
from tandem_engine.kernels.cpu.threads import array_at, finish, take, wait
from tandem_engine.kernels.cpu.vectors import FLOAT_BYTES

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Rows of `STEP`'s `projections`, for each layer,"""

PROJECTIONS = 4

ADDRESS, PANEL_BYTES, BIAS = range(3)
"""and their columns: address of the panels, bytes from one to the next, address of the bias or 0."""

PROJECTION_COLUMNS = 3

SHRINK_ROWS = 16
"""Of A that are one task."""

EXPAND_OUTPUTS = 2048
"""Of B that are one task: sums of one token in a quarter of the first cache."""

TABLE, FIRST, END = range(3)
"""Columns of `STEP`'s `adapters`: address of the adapter's table, and where its tokens are in `adapted_tokens`."""

ADAPTER_COLUMNS = 3

A, A_BYTES, ROWS, SCALES, PARTS = range(5)
"""Columns of a table, int64 [layers, PROJECTIONS, TABLE_COLUMNS]: addresses of A, dense [ROWS, in] with A_BYTES for a
number, and of a factor s for each of its rows, float32; from `PARTS` on there are `MAX_PARTS` parts. ROWS is 0 where
the adapter has nothing."""

FIRST_ROW, RANK, FIRST_OUTPUT, PART_OUTPUTS, B, B_BYTES = range(6)
"""Columns of a part: its rows of A x, its outputs, and the address of Bᵀ, dense [RANK, PART_OUTPUTS] with B_BYTES for
each number. RANK is 0 where there is no further part."""

HALF_BYTES = 2
"""Of a bfloat16 number; of others there are four. B of a bfloat16 model has no others."""

MAX_PARTS, PART_COLUMNS = 3, 6
TABLE_COLUMNS = PARTS + MAX_PARTS * PART_COLUMNS

types: Any = numba_types


class Adapters(NamedTuple):
    """Those of a step; see `STEP`."""

    each: Array
    """[adapters, ADAPTER_COLUMNS]"""
    tokens: Array
    """[N]"""
    low: Array
    """[T, most rows of an A]"""
    delta: Array
    """[T, at least the outputs of a product]"""


@compiled_piece
def product_of_panels(phase: int, x: Array, weight: Array, sums: Array, out: Array, added: bool) -> None:
    """out [T, N] = x [T, K] Wᵀ + b, or that on top of `out`; `weight` is a row of `projections`."""
    panels = panels_of(out)
    panel = take(phase)
    while panel < panels:
        multiply_panel(x, weight[ADDRESS] + panel * weight[PANEL_BYTES], sums)
        if added:
            _add(sums, weight[BIAS], panel, x, out)
        else:
            _put(sums, weight[BIAS], panel, x, out)
        finish(phase)
        panel = take(phase)
    wait(phase, panels)


@inlined
def panels_of(out: Array) -> int:
    """Of the weight that gives `out` [T, N]."""
    return (out.shape[1] + OUTPUTS - 1) // OUTPUTS  # type: ignore[no-any-return]


@inlined
def _outputs_of(panel: int, out: Array) -> tuple[int, int]:
    """The first output of a panel, and their number, which is less than OUTPUTS in the last one."""
    first = panel * OUTPUTS
    return first, min(OUTPUTS, out.shape[1] - first)


@inlined
def _put(sums: Array, bias: int, panel: int, like: Array, out: Array) -> None:
    """out[:, outputs of the panel] = sums + bias, as a number of `like`."""
    first, count = _outputs_of(panel, out)
    _add_bias(sums, bias, first, count, out.shape[0])
    for token in range(out.shape[0]):
        for i in range(count):
            out[token, first + i] = rounded(sums[token, i], like)


@inlined
def _add(sums: Array, bias: int, panel: int, like: Array, out: Array) -> None:
    """The same on top of `out`, whose numbers are those of `like` too."""
    first, count = _outputs_of(panel, out)
    _add_bias(sums, bias, first, count, out.shape[0])
    for token in range(out.shape[0]):
        for i in range(count):
            out[token, first + i] = rounded(out[token, first + i] + rounded(sums[token, i], like), like)


@inlined
def _add_bias(sums: Array, bias: int, first: int, count: int, rows: int) -> None:
    """sums [T, OUTPUTS] += the bias of `count` outputs from `first` on, if there is one at its address."""
    if bias == 0:
        return
    offsets = array_at(bias, (first + count,), types.float32)
    for row in range(rows):
        for i in range(count):
            sums[row, i] += offsets[first + i]


@compiled_piece
def product_with_adapters(
    phase: int, x: Array, weight: Array, sums: Array, out: Array, added: bool, place: int, adapters: Adapters
) -> None:
    """As `product_of_panels`, with what adapters add to the product at `place`."""
    panels = panels_of(out)
    panel = take(phase)
    while panel < panels:
        multiply_panel(x, weight[ADDRESS] + panel * weight[PANEL_BYTES], sums)
        first, count = _outputs_of(panel, out)
        _add_bias(sums, weight[BIAS], first, count, out.shape[0])
        add_to_panel(first, count, place, adapters, sums, x)
        if added:
            _add(sums, 0, panel, x, out)
        else:
            _put(sums, 0, panel, x, out)
        finish(phase)
        panel = take(phase)
    wait(phase, panels)


@compiled_piece
def shrink(phase: int, place: int, adapters: Adapters, x: Array) -> None:
    """`low` of all adapted tokens; `place` is that of a product in the tables, layer by layer."""
    chunks = (adapters.low.shape[1] + SHRINK_ROWS - 1) // SHRINK_ROWS
    tasks = adapters.each.shape[0] * chunks
    task = take(phase)
    while task < tasks:
        adapter = adapters.each[task // chunks]
        found = _product_of(adapter, place)
        first = task % chunks * SHRINK_ROWS
        end = min(first + SHRINK_ROWS, found[ROWS])
        if first < end:
            shape = (found[ROWS], x.shape[1])
            scales = array_at(found[SCALES], (found[ROWS],), types.float32)
            if found[A_BYTES] == HALF_BYTES:
                _shrink_rows(array_at(found[A], shape, types.uint16), scales, first, end, adapter, adapters, x)
            else:
                _shrink_rows(array_at(found[A], shape, types.float32), scales, first, end, adapter, adapters, x)
        finish(phase)
        task = take(phase)
    wait(phase, tasks)


@inlined
def _shrink_rows(a: Array, scales: Array, first: int, end: int, adapter: Array, adapters: Adapters, x: Array) -> None:
    """`low` of the adapter's tokens, by rows of A."""
    for row in range(first, end):
        for index in range(adapter[FIRST], adapter[END]):
            token = adapters.tokens[index]
            total = _dot(a[row], x[token], x.shape[1])
            adapters.low[token, row] = rounded(total * scales[row], x)


@compiled_piece
def expand(phase: int, place: int, outputs: int, adapters: Adapters) -> None:
    """`delta` of all adapted tokens at a product of so many outputs, after `shrink`."""
    chunks = (outputs + EXPAND_OUTPUTS - 1) // EXPAND_OUTPUTS
    tasks = adapters.each.shape[0] * chunks
    task = take(phase)
    while task < tasks:
        adapter = adapters.each[task // chunks]
        found = _product_of(adapter, place)
        first = task % chunks * EXPAND_OUTPUTS
        if found[ROWS] != 0:
            _expand_outputs(found, first, min(first + EXPAND_OUTPUTS, outputs), adapter, adapters)
        finish(phase)
        task = take(phase)
    wait(phase, tasks)


@inlined
def _expand_outputs(found: Array, first: int, end: int, adapter: Array, adapters: Adapters) -> None:
    """`delta` of the adapter's tokens, from output `first` to `end`."""
    for index in range(adapter[FIRST], adapter[END]):
        adapters.delta[adapters.tokens[index], first:end] = np.float32(0.0)
    for number in range(MAX_PARTS):
        part = found[PARTS + number * PART_COLUMNS : PARTS + (number + 1) * PART_COLUMNS]
        begin = max(first, part[FIRST_OUTPUT])
        width = min(end, part[FIRST_OUTPUT] + part[PART_OUTPUTS]) - begin
        if part[RANK] == 0 or width <= 0:
            continue
        size = part[B_BYTES]
        b = part[B] + (begin - part[FIRST_OUTPUT]) * size
        for index in range(adapter[FIRST], adapter[END]):
            token = adapters.tokens[index]
            # Ranges of their own: loops over slices are not known to take adjacent numbers, and remain scalar.
            delta = array_at(adapters.delta[token].ctypes.data + begin * FLOAT_BYTES, (width,), types.float32)
            for rank in range(part[RANK]):
                row, factor = b + rank * part[PART_OUTPUTS] * size, adapters.low[token, part[FIRST_ROW] + rank]
                if size == HALF_BYTES:
                    _add_row(factor, array_at(row, (width,), types.uint16), delta)
                else:
                    _add_row(factor, array_at(row, (width,), types.float32), delta)


@inlined
def _add_row(factor: float, row: Array, delta: Array) -> None:
    """delta += factor · a row of Bᵀ"""
    for i in range(delta.shape[0]):
        delta[i] += factor * widened(row[i])


@inlined
def add_to_panel(first: int, count: int, place: int, adapters: Adapters, sums: Array, like: Array) -> None:
    """sums [T, OUTPUTS], `count` outputs of a product from `first` on, += `delta`.

    Both are rounded as numbers of `like` before and after.
    """
    for number in range(adapters.each.shape[0]):
        adapter = adapters.each[number]
        if _product_of(adapter, place)[ROWS] == 0:
            continue
        for index in range(adapter[FIRST], adapter[END]):
            token = adapters.tokens[index]
            delta = array_at(adapters.delta[token].ctypes.data + first * FLOAT_BYTES, (count,), types.float32)
            for i in range(count):
                sums[token, i] = rounded(rounded(sums[token, i], like) + rounded(delta[i], like), like)


@inlined
def _product_of(adapter: Array, place: int) -> Array:
    """A row of an adapter's table."""
    return array_at(adapter[TABLE] + place * TABLE_COLUMNS * 8, (TABLE_COLUMNS,), types.int64)  # type: ignore[no-any-return]


@inlined
def _dot(weights: Array, x: Array, size: int) -> float:
    total = np.float32(0.0)
    for i in range(size):
        total += widened(weights[i]) * widened(x[i])
    return total  # type: ignore[return-value]
