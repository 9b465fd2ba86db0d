"""Products of a step (`kernels.cpu.decoder_step`): x Wᵀ by panels of W, and what adapters add to rows of them.

    low = s · x Aᵀ      `shrink`, in float32, rounded to a number of the model's dtype: a phase before the product
    x Wᵀ + low Bᵀ       `add_to_panel`, while a panel of the product is in the first cache

Rows without an adapter are neither read nor written. Every sum is over its inputs in order, whatever rows a step has,
so a row has the same bits in any batch. A and B are read where the adapter holds them (`model.adapters.weights`), as
float32 or bfloat16.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.ir
import numpy as np
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic, overload

from tandem_engine.kernels.cpu.gemm import OUTPUTS, multiply_panel
from tandem_engine.kernels.cpu.numbers import rounded, widened
from tandem_engine.kernels.cpu.pieces import Array, compiled_piece, inlined, kernel_piece_options
from tandem_engine.kernels.cpu.threads import array_at, finish, take, wait
from tandem_engine.kernels.cpu.vectors import LANES, Vectors, load_unaligned

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Rows of `STEP`'s `projections`, for each layer,"""

PROJECTIONS = 4

ADDRESS, PANEL_BYTES, BIAS = range(3)
"""and their columns: address of the panels, bytes from one to the next, address of the bias or 0."""

PROJECTION_COLUMNS = 3

SHRINK_ROWS = 16
"""Of A that are one task."""

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

_HALF_BITS = 16
ir: Any = llvmlite.ir
types: Any = numba_types


class Adapters(NamedTuple):
    """Those of a step; see `STEP`."""

    each: Array
    """[adapters, ADAPTER_COLUMNS]"""
    tokens: Array
    """[N]"""
    low: Array
    """[T, most rows of an A]"""


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
    delta, panels = np.empty(OUTPUTS, np.float32), panels_of(out)
    panel = take(phase)
    while panel < panels:
        multiply_panel(x, weight[ADDRESS] + panel * weight[PANEL_BYTES], sums)
        first, count = _outputs_of(panel, out)
        _add_bias(sums, weight[BIAS], first, count, out.shape[0])
        add_to_panel(first, count, place, adapters, sums, delta, x)
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


@inlined
def add_to_panel(
    first: int, count: int, place: int, adapters: Adapters, sums: Array, delta: Array, like: Array
) -> None:
    """sums [T, OUTPUTS], `count` outputs of a product from `first` on, += what adapters add to them.

    Both are rounded as numbers of `like` before and after. `delta` [OUTPUTS] is overwritten.
    """
    for number in range(adapters.each.shape[0]):
        adapter = adapters.each[number]
        found = _product_of(adapter, place)
        if found[ROWS] == 0:
            continue
        for index in range(MAX_PARTS):
            part = PARTS + index * PART_COLUMNS
            rank, first_output, outputs = found[part + RANK], found[part + FIRST_OUTPUT], found[part + PART_OUTPUTS]
            if rank == 0:
                break
            begin = max(first, first_output)
            width = min(first + count, first_output + outputs) - begin
            if width <= 0:
                continue
            shape, b, size = (rank, outputs), found[part + B], found[part + B_BYTES]
            for place_of_token in range(adapter[FIRST], adapter[END]):
                token = adapters.tokens[place_of_token]
                low = adapters.low[token, found[part + FIRST_ROW] :]
                expand(low, shape, b, size, begin - first_output, width, delta, sums[token, begin - first :], like)


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


def expand(low: Any, shape: Any, b: Any, b_bytes: Any, first: Any, width: Any, delta: Any, sums: Any, like: Any) -> Any:
    """sums[:width] += low · Bᵀ for outputs from `first` on, both rounded as numbers of `like` before and after. For
    compiled code.

    Args:
        low: [at least rank] float32, dense.
        shape: rank and outputs of Bᵀ, of which `b` is the address; `b_bytes` for each number.
        delta: [OUTPUTS] float32, overwritten.
        sums: [at least width] float32, dense.
    """
    raise NotImplementedError("expand is for compiled code")


def _build_panel(*, halves: bool) -> Callable[[int, int, int, int, int], None]:
    """A function for compiled code: OUTPUTS outputs in registers, which are added to those at `out`; with `halves` they
    are put there, to be rounded."""

    @intrinsic  # type: ignore[untyped-decorator]
    def panel(typing_context: Any, low: Any, b: Any, b_row: Any, out: Any, rank: Any) -> Any:  # noqa: ARG001
        """Addresses; `b_row` numbers from one row of Bᵀ to the next."""
        signature = types.void(types.uintp, types.uintp, types.intp, types.uintp, types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            _write_panel(Vectors(builder), *arguments, halves=halves)
            return context.get_dummy_value()

        return signature, generate

    return panel  # type: ignore[no-any-return]


def _write_panel(code: Vectors, low: Any, b: Any, b_row: Any, out: Any, rank: Any, *, halves: bool) -> None:
    builder, columns = code.builder, [code.index(column) for column in range(0, OUTPUTS, LANES)]
    low, out = code.floats(low), code.floats(out)
    b = builder.inttoptr(b, (ir.IntType(16) if halves else code.number).as_pointer())
    # Stack slots, which the optimizer turns into registers.
    totals = [cgutils.alloca_once(builder, code.vector) for _ in columns]
    for total in totals:
        builder.store(code.constant(0.0), total)
    with cgutils.for_range(builder, rank) as loop:
        value = code.spread(builder.load(builder.gep(low, [loop.index])))
        for column, total in zip(columns, totals, strict=True):
            place = code.place(b, loop.index, b_row, column)
            weights = _widened_vector(code, place) if halves else code.load(place)
            builder.store(code.multiply_add(value, weights, builder.load(total)), total)
    for column, total in zip(columns, totals, strict=True):
        place, value = builder.gep(out, [column]), builder.load(total)
        code.store(value if halves else builder.fadd(code.load(place), value), place)


def _widened_vector(code: Vectors, place: Any) -> Any:
    """bfloat16 numbers as float32."""
    builder = code.builder
    words = builder.zext(load_unaligned(builder, place, ir.VectorType(ir.IntType(16), LANES)), code.integers)
    shift = ir.Constant(code.integers, [_HALF_BITS] * LANES)
    return builder.bitcast(builder.shl(words, shift), code.vector)


# numba requires an equal signature, annotations included, of the stub, the chooser and the choices.
def _expand_floats(
    low: Any, shape: Any, b: Any, b_bytes: Any, first: Any, width: Any, delta: Any, sums: Any, like: Any
) -> Any:
    if b_bytes == HALF_BYTES:
        _sum_halves(low, shape, b, first, width, delta)
        for i in range(width):
            sums[i] += delta[i]
        return
    if width == OUTPUTS:
        _panel_of_floats(low.ctypes.data, b + first * like.itemsize, shape[1], sums.ctypes.data, shape[0])
        return
    _sum_outputs(low, array_at(b, shape, types.float32), first, width, delta)
    for i in range(width):
        sums[i] += delta[i]


def _expand_halves(
    low: Any,
    shape: Any,
    b: Any,
    b_bytes: Any,  # noqa: ARG001
    first: Any,
    width: Any,
    delta: Any,
    sums: Any,
    like: Any,
) -> Any:
    _sum_halves(low, shape, b, first, width, delta)
    for i in range(width):
        sums[i] = rounded(rounded(sums[i], like) + rounded(delta[i], like), like)


@inlined
def _sum_halves(low: Array, shape: tuple[int, int], b: int, first: int, width: int, delta: Array) -> None:
    """delta[:width] = low · Bᵀ for outputs from `first` on, where B is bfloat16."""
    if width == OUTPUTS:
        _panel_of_halves(low.ctypes.data, b + first * HALF_BYTES, shape[1], delta.ctypes.data, shape[0])
    else:
        _sum_outputs(low, array_at(b, shape, types.uint16), first, width, delta)


@inlined
def _sum_outputs(low: Array, weights: Array, first: int, width: int, delta: Array) -> None:
    delta[:width] = np.float32(0.0)
    for row in range(weights.shape[0]):
        for i in range(width):
            delta[i] += low[row] * widened(weights[row, first + i])


_panel_of_floats, _panel_of_halves = _build_panel(halves=False), _build_panel(halves=True)


@overload(expand, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _expand_of_dtype(
    low: Any,  # noqa: ARG001
    shape: Any,  # noqa: ARG001
    b: Any,  # noqa: ARG001
    b_bytes: Any,  # noqa: ARG001
    first: Any,  # noqa: ARG001
    width: Any,  # noqa: ARG001
    delta: Any,  # noqa: ARG001
    sums: Any,  # noqa: ARG001
    like: Any,
) -> Any:
    return _expand_floats if like.dtype == types.float32 else _expand_halves
