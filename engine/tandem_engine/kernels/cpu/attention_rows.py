"""The query heads of one K/V head times rows of K and V in place, as vector instructions.

    multiply    each head times each row of K, its lanes not yet added up     sums    [group, room, LANES]
    fold        lanes added up, `LANES` rows at a time                        scores  [room], of one head
    highest     the greatest of some scores
    weigh       scores to weights e^(score − maximum), and their sum
    add         rows of V, each times its weight, on top of a head's output

A row is loaded once for as many heads as fit the registers. Every score is summed in the same order, independent of
other rows, and outputs are summed row after row.

bfloat16 K is multiplied by pairs where the CPU can (`kernels.cpu.vectors`), as are the queries then, which have only
bfloat16 precision. bfloat16 V is widened in registers, so that weights need no rounding.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.ir
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.kernels.cpu.softmax import LOG2_E, exp2
from tandem_engine.kernels.cpu.vectors import LANES, MULTIPLIES_PAIRS, Vectors

ir: Any = llvmlite.ir

_REGISTERS = 24 if LANES == 16 else 8
"""That hold queries, or outputs: half to three quarters of those that there are."""

_ADDRESS, _INTEGER, _FLOAT = types.uintp, types.intp, types.float32
_HALF_BITS = 16

_QUARTER = 4
"""Lanes of 128 bits, within which most shuffles stay."""


class RowPieces(NamedTuple):
    """Functions for compiled code; see the module. Arguments are addresses and numbers."""

    multiply: Callable[[int, int, int, int, int, int], None]
    """queries [group, head_dim], rows of K [count, head_dim], count, sums, room, rows that come next"""
    add: Callable[[int, int, int, int, int, int, int], None]
    """rows of V [count, head_dim], count, weights [group, room], room, outputs [group, …], numbers of their rows, rows
    that come next"""


def by_pairs(dtype: np.dtype[Any]) -> bool:
    """Whether queries are to be pairs of bfloat16, for pages of `dtype`."""
    return MULTIPLIES_PAIRS and dtype == np.uint16


@cache
def build_row_pieces(dtype: np.dtype[Any], head_dim: int, group: int) -> RowPieces:
    """For rows of `dtype`: float32, or bfloat16 seen as uint16, of which K has to be widened if not `by_pairs`."""
    pairs, halves = by_pairs(dtype), dtype == np.uint16
    words = head_dim // 2 if pairs else head_dim
    row_bytes = head_dim * dtype.itemsize

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        typing_context: Any,  # noqa: ARG001
        queries: Any,  # noqa: ARG001
        rows: Any,  # noqa: ARG001
        count: Any,  # noqa: ARG001
        sums: Any,  # noqa: ARG001
        room: Any,  # noqa: ARG001
        ahead: Any,  # noqa: ARG001
    ) -> Any:
        signature = types.void(_ADDRESS, _ADDRESS, _INTEGER, _ADDRESS, _INTEGER, _ADDRESS)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            *places, ahead = arguments
            for heads in _batches(group, words):
                next_row = (ahead, row_bytes) if heads.start == 0 else None
                _write_multiply(Vectors(builder), heads, words, *places, next_row=next_row, pairs=pairs)
            return context.get_dummy_value()

        return signature, generate

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        typing_context: Any,  # noqa: ARG001
        rows: Any,  # noqa: ARG001
        count: Any,  # noqa: ARG001
        weights: Any,  # noqa: ARG001
        room: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_row: Any,  # noqa: ARG001
        ahead: Any,  # noqa: ARG001
    ) -> Any:
        signature = types.void(_ADDRESS, _INTEGER, _ADDRESS, _INTEGER, _ADDRESS, _INTEGER, _ADDRESS)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            *places, ahead = arguments
            for heads in _batches(group, head_dim):
                next_row = (ahead, row_bytes) if heads.start == 0 else None
                _write_add(Vectors(builder), heads, head_dim, *places, next_row=next_row, halves=halves)
            return context.get_dummy_value()

        return signature, generate

    return RowPieces(multiply=multiply, add=add)


@intrinsic  # type: ignore[untyped-decorator]
def fold(typing_context: Any, sums: Any, count: Any, scale: Any, scores: Any) -> Any:  # noqa: ARG001
    """scores[row] = scale · the sum of sums[row, :], for `count` rows rounded up to `LANES`."""
    signature = types.void(_ADDRESS, _INTEGER, _FLOAT, _ADDRESS)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        sums, count, scale, scores = arguments
        sums, scores, factor = code.floats(sums), code.floats(scores), code.spread(scale)
        with cgutils.for_range(builder, _vectors(code, count)) as loop:
            first = builder.mul(loop.index, code.index(LANES))
            rows = [
                code.load(code.place(sums, builder.add(first, code.index(row)), code.index(LANES), code.index(0)))
                for row in range(LANES)
            ]
            code.store(builder.fmul(_folded(code, rows), factor), builder.gep(scores, [first]))
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def highest(typing_context: Any, scores: Any, count: Any) -> Any:  # noqa: ARG001
    """The greatest of `count` scores; NaN is none."""
    signature = _FLOAT(_ADDRESS, _INTEGER)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        scores, count = code.floats(arguments[0]), arguments[1]
        most = cgutils.alloca_once_value(builder, code.constant(float("-inf")))
        with cgutils.for_range(builder, _vectors(code, count)) as loop:
            first = builder.mul(loop.index, code.index(LANES))
            score = code.load(builder.gep(scores, [first]))
            greater = builder.fcmp_ordered(">", score, builder.load(most))
            chosen = builder.and_(greater, _within(code, first, count))
            builder.store(builder.select(chosen, score, builder.load(most)), most)
        value, width = builder.load(most), LANES // 2
        while width:
            other = _turned(code, value, width)
            value = builder.select(builder.fcmp_ordered(">", other, value), other, value)
            width //= 2
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def weigh_row(typing_context: Any, scores: Any, count: Any, maximum: Any) -> Any:  # noqa: ARG001
    """`count` scores become e^(score − maximum); returns their sum."""
    signature = _FLOAT(_ADDRESS, _INTEGER, _FLOAT)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        scores, count, reference = code.floats(arguments[0]), arguments[1], code.spread(arguments[2])
        total = cgutils.alloca_once_value(builder, code.constant(0.0))
        with cgutils.for_range(builder, _vectors(code, count)) as loop:
            first = builder.mul(loop.index, code.index(LANES))
            place = builder.gep(scores, [first])
            power = builder.fmul(builder.fsub(code.load(place), reference), code.constant(LOG2_E))
            weight = builder.select(_within(code, first, count), exp2(code, power), code.constant(0.0))
            code.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        value, width = builder.load(total), LANES // 2
        while width:
            value = builder.fadd(value, _turned(code, value, width))
            width //= 2
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return signature, generate


def _batches(group: int, numbers: int) -> list[range]:
    """The heads of a group, so many at a time that a row of each fits the registers."""
    size = max(1, _REGISTERS // -(-numbers // LANES))
    return [range(first, min(first + size, group)) for first in range(0, group, size)]


def _parts(numbers: int) -> list[tuple[int, int]]:
    """First number and count of each vector of a row."""
    return [(first, min(LANES, numbers - first)) for first in range(0, numbers, LANES)]


def _write_multiply(
    code: Vectors,
    heads: range,
    words: int,
    queries: Any,
    rows: Any,
    count: Any,
    sums: Any,
    room: Any,
    *,
    next_row: tuple[Any, int] | None,
    pairs: bool,
) -> None:
    builder, parts = code.builder, _parts(words)
    kind = code.ints if pairs else code.floats
    queries, rows, sums = kind(queries), kind(rows), code.floats(sums)
    own = {
        (head, first): _load(code, builder.gep(queries, [code.index(head * words + first)]), size)
        for head in heads
        for first, size in parts
    }
    with cgutils.for_range(builder, count) as loop:
        _fetch(code, next_row, loop.index)
        row = [
            _load(code, code.place(rows, loop.index, code.index(words), code.index(first)), size)
            for first, size in parts
        ]
        for head in heads:
            total = code.constant(0.0)
            for (first, _), numbers in zip(parts, row, strict=True):
                query = own[head, first]
                total = (
                    code.add_products_of_pairs(query, numbers, total)
                    if pairs
                    else code.multiply_add(query, numbers, total)
                )
            slot = builder.add(builder.mul(code.index(head), room), loop.index)
            code.store(total, code.place(sums, slot, code.index(LANES), code.index(0)))


def _write_add(
    code: Vectors,
    heads: range,
    head_dim: int,
    rows: Any,
    count: Any,
    weights: Any,
    room: Any,
    out: Any,
    out_row: Any,
    *,
    next_row: tuple[Any, int] | None,
    halves: bool,
) -> None:
    builder, parts = code.builder, _parts(head_dim)
    weights, out = code.floats(weights), code.floats(out)
    rows = builder.inttoptr(rows, ir.IntType(16).as_pointer()) if halves else code.floats(rows)
    places = {
        (head, first): code.place(out, code.index(head), out_row, code.index(first))
        for head in heads
        for first, _ in parts
    }
    totals = {
        (head, first): cgutils.alloca_once_value(builder, _load(code, places[head, first], size))
        for head in heads
        for first, size in parts
    }
    with cgutils.for_range(builder, count) as loop:
        _fetch(code, next_row, loop.index)
        row = [
            _load(code, code.place(rows, loop.index, code.index(head_dim), code.index(first)), size)
            for first, size in parts
        ]
        for head in heads:
            weight = code.spread(builder.load(code.place(weights, code.index(head), room, loop.index)))
            for (first, _), numbers in zip(parts, row, strict=True):
                total = totals[head, first]
                builder.store(code.multiply_add(weight, numbers, builder.load(total)), total)
    for (head, first), place in places.items():
        _store(code, builder.load(totals[head, first]), place, min(LANES, head_dim - first))


def _fetch(code: Vectors, next_row: tuple[Any, int] | None, index: Any) -> None:
    if next_row is not None:
        start, size = next_row
        code.prefetch(code.builder.add(start, code.builder.mul(index, code.index(size))), size)


def _load(code: Vectors, place: Any, count: int) -> Any:
    """`count` numbers, those of 16 bits widened to float32, followed by zeros."""
    builder, number = code.builder, place.type.pointee
    kind = ir.VectorType(number, count)
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 2 if number == ir.IntType(16) else 4
    if number == ir.IntType(16):
        word = ir.VectorType(ir.IntType(32), count)
        bits = builder.shl(builder.zext(loaded, word), ir.Constant(word, [_HALF_BITS] * count))
        number, kind = code.number, ir.VectorType(code.number, count)
        loaded = builder.bitcast(bits, kind)
    if count == LANES:
        return loaded
    mask = ir.Constant(code.integers, [min(lane, count) for lane in range(LANES)])
    return builder.shuffle_vector(loaded, ir.Constant(kind, [0] * count), mask)


def _store(code: Vectors, value: Any, place: Any, count: int) -> None:
    if count < LANES:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count)))
        value = code.builder.shuffle_vector(value, value, mask)
    code.store(value, place)


def _folded(code: Vectors, rows: list[Any]) -> Any:
    """Lane i is the sum of rows[i]: four rows to quarters with a lane of each, then the quarters of a row together."""
    builder = code.builder

    def joined(one: Any, other: Any, masks: tuple[list[int], ...]) -> Any:
        halves = (builder.shuffle_vector(one, other, ir.Constant(code.integers, mask)) for mask in masks)
        return builder.fadd(*halves)

    starts = range(0, LANES, _QUARTER)
    singles = tuple(
        [lane for s in starts for lane in (s + of, LANES + s + of, s + of + 1, LANES + s + of + 1)] for of in (0, 2)
    )
    doubles = tuple(
        [lane for s in starts for lane in (s + of, s + of + 1, LANES + s + of, LANES + s + of + 1)] for of in (0, 2)
    )
    rows = [joined(one, other, singles) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    rows = [joined(one, other, doubles) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    quarters = tuple(
        [lane for s in range(of * _QUARTER, 2 * LANES, 2 * _QUARTER) for lane in range(s, s + _QUARTER)]
        for of in (0, 1)
    )
    while len(rows) > 1:
        rows = [joined(one, other, quarters) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def _turned(code: Vectors, value: Any, by: int) -> Any:
    mask = ir.Constant(code.integers, [(lane + by) % LANES for lane in range(LANES)])
    return code.builder.shuffle_vector(value, value, mask)


def _vectors(code: Vectors, count: Any) -> Any:
    """As many as hold `count` numbers."""
    return code.builder.udiv(code.builder.add(count, code.index(LANES - 1)), code.index(LANES))


def _within(code: Vectors, first: Any, count: Any) -> Any:
    """Lanes whose number, from `first` on, is below `count`."""
    left = code.spread(code.builder.trunc(code.builder.sub(count, first), ir.IntType(32)))
    return code.builder.icmp_signed("<", ir.Constant(code.integers, list(range(LANES))), left)
