"""Products of rows with one panel of a weight, as vector instructions.

A tile of rows is summed in registers: each word of the panel that is loaded serves all of its rows. Inputs are taken in
blocks, so that the tiles of many rows find their part of the panel in the first caches.

Every output is summed over the inputs in their order, whatever tile its row falls into and wherever blocks begin. So a
row's result is the same to the bit alone and in any batch.

bfloat16 goes by pairs of inputs (`attention.vectors`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.ir
import numpy as np
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic, overload

from tandem_engine.attention.pieces import inlined, kernel_piece_options
from tandem_engine.attention.vectors import LANES, Vectors
from tandem_engine.model.fused.panels import OUTPUTS, ROW_BYTES, WORD_BYTES

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
    # Stack slots, which the optimiser turns into registers.
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
"""Rows and vectors of the tiles: as many sums as hide the latency of adding, and fit the registers beside weights."""


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

    # numba wants the very same signature, annotations included, of the stub, the chooser and the choices.
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
