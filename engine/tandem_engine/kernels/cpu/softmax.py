"""The softmax of attention as vector instructions: adjacent scores of many queries become weights.

Scores are [keys, PANEL]: a row for each key, a lane for each query. Lanes are independent, so a query's weights are the
same to the bit next to any other queries. Keys come in blocks; `weigh` carries each lane's maximum and the sum of its
weights from block to block, as in "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018).

Scores count in powers of two: the caller's scale includes the factor log2 e. It is applied to the difference of a score
and the maximum, or by the caller to the queries; then it is 1 here.
"""

import math
from typing import Any

import llvmlite.ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.kernels.cpu.vectors import LANES, PANEL, Vectors, upper_half

ir: Any = llvmlite.ir
LOG2_E = math.log2(math.e)

# exp2 on [-0.5, 0.5] by its Taylor terms ln(2)^n / n!; the first one left out is below 2e-8.
_TERMS = tuple(math.log(2) ** n / math.factorial(n) for n in range(7))
_MIN_EXPONENT = -126.0
_MANTISSA_BITS = 23
_HALF_BITS = 16
_ADDRESS, _INTEGER, _FLOAT = types.uintp, types.intp, types.float32


@intrinsic  # type: ignore[untyped-decorator]
def hide(typing_context: Any, scores: Any, keys: Any, position: Any, first: Any, end: Any) -> Any:  # noqa: ARG001
    """scores[key, lane] = −inf where position + key is not in [first[lane], end[lane]).

    Addresses of float32 scores [keys, PANEL] and of int32 `first` and `end` [PANEL].
    """
    signature = types.void(_ADDRESS, _INTEGER, _INTEGER, _ADDRESS, _ADDRESS)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        scores, keys, position, first, end = arguments
        scores, bounds = code.floats(scores), [code.ints(address) for address in (first, end)]
        for column in _columns(code):
            oldest, newest = (code.load(builder.gep(bound, [column])) for bound in bounds)
            with cgutils.for_range(builder, keys) as loop:
                key = code.spread(builder.trunc(builder.add(position, loop.index), ir.IntType(32)))
                seen = builder.and_(
                    builder.icmp_signed(">=", key, oldest),
                    builder.icmp_signed("<", key, newest),
                )
                place = code.place(scores, loop.index, code.index(PANEL), column)
                code.store(builder.select(seen, code.load(place), code.constant(-math.inf)), place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def bound(typing_context: Any, scores: Any, keys: Any, cap: Any, scale: Any) -> Any:  # noqa: ARG001
    """scores = log2 e · cap · tanh(scale · scores), by tanh |x| = (1 − e^(−2|x|)) / (1 + e^(−2|x|)).

    An address of float32 scores [keys, PANEL], and two float32.
    """
    signature = types.void(_ADDRESS, _INTEGER, _FLOAT, _FLOAT)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        scores, keys, cap, scale = arguments
        scores, scale = code.floats(scores), code.spread(scale)
        limit = builder.fmul(code.spread(cap), code.constant(LOG2_E))
        one, zero = code.constant(1.0), code.constant(0.0)
        for column in _columns(code):
            with cgutils.for_range(builder, keys) as loop:
                place = code.place(scores, loop.index, code.index(PANEL), column)
                score = builder.fmul(code.load(place), scale)
                negative = builder.fcmp_ordered("<", score, zero)
                size = builder.select(negative, builder.fsub(zero, score), score)
                decay = exp2(code, builder.fmul(size, code.constant(-2.0 * LOG2_E)))
                share = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
                bounded = builder.fmul(limit, share)
                code.store(builder.select(negative, builder.fsub(zero, bounded), bounded), place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def weigh(
    typing_context: Any,  # noqa: ARG001
    scores: Any,  # noqa: ARG001
    keys: Any,  # noqa: ARG001
    maximum: Any,  # noqa: ARG001
    total: Any,  # noqa: ARG001
    factor: Any,  # noqa: ARG001
    scale: Any,  # noqa: ARG001
) -> Any:
    """Scores to weights 2^(scale · (score − maximum)), where each lane's maximum counts all blocks so far.

    `total` becomes the sum of all weights so far, and `factor` what the weights of the blocks before have to be
    multiplied with. Weights below 2^-126 are 0, and so are all of a lane that has seen nothing but −inf.

    Addresses of float32 scores [keys, PANEL], and of maximum, total and factor [PANEL]; a float32 above 0.
    """
    signature = types.void(_ADDRESS, _INTEGER, _ADDRESS, _ADDRESS, _ADDRESS, _FLOAT)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        scores, keys, *statistics, scale = arguments
        scores, scale = code.floats(scores), code.spread(scale)
        columns = _columns(code)
        maxima, totals, factors = (
            [builder.gep(code.floats(address), [column]) for column in columns] for address in statistics
        )
        highest = [_variable(code, code.load(place)) for place in maxima]
        with cgutils.for_range(builder, keys) as loop:
            for column, most in zip(columns, highest, strict=True):
                score = code.load(code.place(scores, loop.index, code.index(PANEL), column))
                before = builder.load(most)
                builder.store(builder.select(builder.fcmp_ordered(">", score, before), score, before), most)
        references = [_finite(code, builder.load(most)) for most in highest]
        for most, reference, before, after in zip(highest, references, maxima, factors, strict=True):
            code.store(exp2(code, builder.fmul(scale, builder.fsub(code.load(before), reference))), after)
            code.store(builder.load(most), before)
        sums = [_variable(code, code.constant(0.0)) for _ in columns]
        with cgutils.for_range(builder, keys) as loop:
            for column, reference, weights in zip(columns, references, sums, strict=True):
                place = code.place(scores, loop.index, code.index(PANEL), column)
                weight = exp2(code, builder.fmul(scale, builder.fsub(code.load(place), reference)))
                code.store(weight, place)
                builder.store(builder.fadd(builder.load(weights), weight), weights)
        for place, after, weights in zip(totals, factors, sums, strict=True):
            code.store(code.multiply_add(code.load(place), code.load(after), builder.load(weights)), place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def pair_up(typing_context: Any, weights: Any, keys: Any) -> Any:  # noqa: ARG001
    """Weights of two keys after each other become pairs of bfloat16, to nearest and ties to even, in the first rows.

    Address of float32 weights [keys, PANEL], of which row `keys` is there too and 0 when that is odd.
    """
    signature = types.void(_ADDRESS, _INTEGER)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code = Vectors(builder)
        weights, keys = arguments
        weights = code.floats(weights)
        one = code.index(1)
        pairs = builder.lshr(builder.add(keys, one), one)
        with cgutils.for_range(builder, pairs) as loop:
            first = builder.shl(loop.index, one)
            for column in _columns(code):
                low, high = (
                    upper_half(builder, code.load(code.place(weights, row, code.index(PANEL), column)))
                    for row in (first, builder.add(first, one))
                )
                half = ir.Constant(code.integers, [_HALF_BITS] * LANES)
                word = builder.or_(builder.lshr(low, half), high)
                target = code.place(weights, loop.index, code.index(PANEL), column)
                code.store(builder.bitcast(word, code.vector), target)
        return context.get_dummy_value()

    return signature, generate


def _columns(code: Vectors) -> list[Any]:
    return [code.index(column) for column in range(0, PANEL, LANES)]


def _variable(code: Vectors, value: Any) -> Any:
    """A stack slot that holds `value`."""
    slot = cgutils.alloca_once(code.builder, code.vector)
    code.builder.store(value, slot)
    return slot


def _finite(code: Vectors, maximum: Any) -> Any:
    """What to count from: the maximum, or 0 where there is none yet, for −inf − −inf is no number."""
    none = code.builder.fcmp_ordered("==", maximum, code.constant(-math.inf))
    return code.builder.select(none, code.constant(0.0), maximum)


def exp2(code: Vectors, power: Any) -> Any:
    """2^power for power ≤ 0, and 0 below 2^-126; NaN stays NaN.

    2^(n + f) = poly(f), with n added to its exponent bits.
    """
    builder = code.builder
    vanishes = builder.fcmp_ordered("<", power, code.constant(_MIN_EXPONENT))
    power = builder.select(vanishes, code.constant(0.0), power)
    kind = ir.FunctionType(code.vector, [code.vector])
    floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
    whole = builder.call(floor, [builder.fadd(power, code.constant(0.5))])
    fraction = builder.fsub(power, whole)
    value = code.constant(_TERMS[-1])
    for coefficient in reversed(_TERMS[:-1]):
        value = code.multiply_add(value, fraction, code.constant(coefficient))
    shift = ir.Constant(code.integers, [_MANTISSA_BITS] * LANES)
    exponent = builder.shl(builder.fptosi(whole, code.integers), shift)
    bits = builder.add(builder.bitcast(value, code.integers), exponent)
    return builder.select(vanishes, code.constant(0.0), builder.bitcast(bits, code.vector))
