"""Products of few rows with weights in panels, as vector instructions: one result per row, to the bit, in any batch.

    float32     W [out, in]  ─▶  [out / OUTPUTS, in, OUTPUTS]
    bfloat16    the same, inputs in pairs: [out / OUTPUTS, in / 2, OUTPUTS, 2]

`OUTPUTS` outputs are adjacent for each input, so a panel is read as one run of bytes: `OUTPUTS` words of 32 bits for
each step of a sum. Zeros fill up the last panel, and the inputs that an allocation has beyond the weight's.

`kernels.cpu.panels` makes and finds panels.

`multiply_panel` sums a tile of rows in registers: each word of the panel that is loaded serves all of its rows. Inputs
are taken in blocks, so that the tiles of many rows find their part of the panel in the first caches. Every output is
summed over the inputs in order, whatever the tiles and blocks. bfloat16 goes by pairs of inputs
(`kernels.cpu.vectors`).

`multiply_int8_panel` reads int8 weights (`panels.pack_int8`), a quarter of the bytes of float32. A block of the panel
becomes float32, or pairs of bfloat16, in the first cache, which is exact, and is multiplied there.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.ir
import numba
import numpy as np
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic, overload

from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.numbers import cut, narrowed
from tandem_engine.kernels.cpu.pieces import compiled_callback, inlined, kernel_piece_options
from tandem_engine.kernels.cpu.threads import array_at, take
from tandem_engine.kernels.cpu.vectors import LANES, Vectors

OUTPUTS = 64
WORD_BYTES = 4
ROW_BYTES = OUTPUTS * WORD_BYTES


ir: Any = llvmlite.ir
types: Any = numba_types

BLOCK = 256
"""Steps between which sums wait in memory: 64 KiB of a panel."""

_WIDE = LANES == 16
Tile = Callable[[int, int, int, int, int], None]


def multiply_panel(x: Any, panel: Any, sums: Any) -> Any:
    """sums[row, output] = Σ over inputs of x[row, input] · W[output, input].

    For compiled code.

    Args:
        x: [rows, inputs], dense, of the weight's dtype; bfloat16 as uint16, an even number of inputs.
        panel: address of one panel.
        sums: [at least rows, OUTPUTS] float32, dense.
    """
    raise NotImplementedError("multiply_panel is for compiled code")


def _build_tile(rows: int, vectors: int, *, pairs: bool) -> Tile:
    """`rows` rows, with as many vectors of outputs at a time."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typing_context: Any, x: Any, x_row: Any, panel: Any, sums: Any, steps: Any) -> Any:  # noqa: ARG001
        """sums += x · panel; addresses, `x_row` words from one row of x to the next."""
        signature = types.void(types.uintp, types.intp, types.uintp, types.uintp, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            code = Vectors(builder)
            for first in range(0, OUTPUTS, vectors * LANES):
                columns = [code.index(first + vector * LANES) for vector in range(vectors)]
                _write_tile(code, rows, columns, *arguments, pairs=pairs)
            return context.get_dummy_value()

        return signature, generate

    return tile  # type: ignore[no-any-return]


def _write_tile(
    code: Vectors, rows: int, columns: list[Any], x: Any, x_row: Any, panel: Any, sums: Any, steps: Any, *, pairs: bool
) -> None:
    builder, width = code.builder, code.index(OUTPUTS)
    words = code.ints if pairs else code.floats
    x, panel, sums = words(x), words(panel), code.floats(sums)
    # Stack slots, which the optimizer turns into registers.
    totals = [[cgutils.alloca_once(builder, code.vector) for _ in columns] for _ in range(rows)]
    places = [[code.place(sums, width, code.index(row), column) for column in columns] for row in range(rows)]
    for row_totals, row_places in zip(totals, places, strict=True):
        for total, place in zip(row_totals, row_places, strict=True):
            builder.store(code.load(place), total)
    with cgutils.for_range(builder, steps) as loop:
        weights = [code.load(code.place(panel, loop.index, width, column)) for column in columns]
        for row, row_totals in enumerate(totals):
            value = builder.load(code.place(x, x_row, code.index(row), loop.index))
            for weight, total in zip(weights, row_totals, strict=True):
                before = builder.load(total)
                after = (
                    code.add_pairs(value, weight, before)
                    if pairs
                    else code.multiply_add(code.spread(value), weight, before)
                )
                builder.store(after, total)
    for row_totals, row_places in zip(totals, places, strict=True):
        for total, place in zip(row_totals, row_places, strict=True):
            code.store(builder.load(total), place)


_FULL = 6 if _WIDE else 4
"""Rows of the largest tile."""

_SHAPES = ((6, 4), (4, 4), (2, 4), (1, 4)) if _WIDE else ((4, 2), (4, 2), (2, 4), (1, 8))
"""Rows and vectors of the tiles: as many sums as hide the latency of adding, and fit the registers next to weights."""


@cache
def block_adder(*, pairs: bool) -> Callable[[int, int, int, int, int, int], None]:
    """A function for compiled code: sums += x · a block of a panel, for any number of rows.

    Its arguments: address of x in the first column of the block, words of a row of x, address of the block, address of
    the sums, steps of the block, rows.
    """
    full, four, two, one = (_build_tile(rows, vectors, pairs=pairs) for rows, vectors in _SHAPES)

    def add_block(source: int, row: int, weights: int, target: int, count: int, rows: int) -> None:
        left = rows
        while left > 0:
            if left >= _FULL:
                full(source, row, weights, target, count)
                done = _FULL
            elif left >= 4:
                four(source, row, weights, target, count)
                done = 4
            elif left >= 2:
                two(source, row, weights, target, count)
                done = 2
            else:
                one(source, row, weights, target, count)
                done = 1
            left -= done
            source += done * row * WORD_BYTES
            target += done * ROW_BYTES

    return inlined(add_block)  # type: ignore[no-any-return]


def _multiplier(*, pairs: bool) -> Callable[[Any, Any, Any], None]:
    add_block = block_adder(pairs=pairs)

    # numba requires an equal signature, annotations included, of the stub, the chooser and the choices.
    def multiply(x: Any, panel: Any, sums: Any) -> Any:
        rows, steps = x.shape[0], x.shape[1] * x.itemsize // WORD_BYTES
        block = max(steps, 1) if rows <= _FULL else BLOCK
        sums[:rows] = np.float32(0.0)
        for first in range(0, steps, block):
            count = min(block, steps - first)
            weights = panel + first * ROW_BYTES
            add_block(x.ctypes.data + first * WORD_BYTES, steps, weights, sums.ctypes.data, count, rows)

    return multiply


_multiply_floats, _multiply_pairs = _multiplier(pairs=False), _multiplier(pairs=True)


@overload(multiply_panel, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _multiply_of_dtype(x: Any, panel: Any, sums: Any) -> Any:  # noqa: ARG001
    return _multiply_floats if x.dtype == types.float32 else _multiply_pairs


INT8_BLOCK = 64
"""Steps that are widened together: 16 KiB."""


def multiply_int8_panel(x: Any, panel: Any, sums: Any) -> Any:
    """As `multiply_panel`, where the panel has a byte for each number. For compiled code."""
    raise NotImplementedError("multiply_int8_panel is for compiled code")


def _int8_multiplier(number: type[np.generic], *, pairs: bool) -> Callable[[Any, Any, Any], None]:
    add_block, numbers_of_step = block_adder(pairs=pairs), OUTPUTS * (2 if pairs else 1)

    # numba requires an equal signature, annotations included, of the stub, the chooser and the choices.
    def multiply(x: Any, panel: Any, sums: Any) -> Any:
        rows, steps = x.shape[0], x.shape[1] * x.itemsize // WORD_BYTES
        wide = np.empty(INT8_BLOCK * numbers_of_step, number)
        sums[:rows] = np.float32(0.0)
        for first in range(0, steps, INT8_BLOCK):
            count = min(INT8_BLOCK, steps - first)
            codes = array_at(panel + first * numbers_of_step, (count * numbers_of_step,), types.int8)
            for i in range(count * numbers_of_step):
                wide[i] = cut(np.float32(codes[i]), wide)
            add_block(x.ctypes.data + first * WORD_BYTES, steps, wide.ctypes.data, sums.ctypes.data, count, rows)

    return multiply


_multiply_int8_floats, _multiply_int8_pairs = (
    _int8_multiplier(np.float32, pairs=False),
    _int8_multiplier(np.uint16, pairs=True),
)


@overload(multiply_int8_panel, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _multiply_int8_of_dtype(x: Any, panel: Any, sums: Any) -> Any:  # noqa: ARG001
    return _multiply_int8_floats if x.dtype == types.float32 else _multiply_int8_pairs


PARALLEL_BYTES = 1 << 18
"""Of a weight, from which other threads, some 5 µs away, pay."""

PRODUCT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "next_panel",
            "tokens",
            "inputs",
            "outputs",
            "x",
            "panels",
            "panel_bytes",
            "scales",
            "bias",
            "out",
        )
    ]
)
"""What the kernel is given. Addresses: x [tokens, inputs] and out [tokens, outputs] of the weight's dtype, or of the
model's where that is int8; scales [outputs], for int8, and bias [outputs], float32 or 0. `next_panel` counts what has
been taken, from 0."""

ProductKernel = Any
"""A compiled callback of the address of a `PRODUCT` record; takes panels until none is left."""


@kept
def build_product_kernel(dtype: np.dtype[Any], *, int8: bool = False) -> ProductKernel:
    """The kernel for weights of float32, of bfloat16 seen as uint16, or of `int8` and an x of one of these."""
    multiply = multiply_int8_panel if int8 else multiply_panel
    number = numba.from_dtype(dtype)

    def multiply_panels(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        x = array_at(work.x, (work.tokens, work.inputs), number)
        out = array_at(work.out, (work.tokens, work.outputs), number)
        sums = np.empty((work.tokens, OUTPUTS), np.float32)
        panel = take(data)
        while panel * OUTPUTS < work.outputs:
            multiply(x, work.panels + panel * work.panel_bytes, sums)
            first = panel * OUTPUTS
            count = min(OUTPUTS, work.outputs - first)
            if int8:
                scales = array_at(work.scales, (work.outputs,), types.float32)
                for token in range(work.tokens):
                    for i in range(count):
                        sums[token, i] *= scales[first + i]
            if work.bias != 0:
                bias = array_at(work.bias, (work.outputs,), types.float32)
                for token in range(work.tokens):
                    for i in range(count):
                        sums[token, i] += bias[first + i]
            for token in range(work.tokens):
                for i in range(count):
                    out[token, first + i] = narrowed(sums[token, i], out)
            panel = take(data)

    return compiled_callback(multiply_panels, types.void(types.CPointer(numba.from_dtype(PRODUCT))))
