"""Numbers of a model's dtype in compiled code, which computes in float32 and rounds where torch would.

numpy lacks some dtypes; compiled loops take their bits as integers:

    bfloat16       uint16   the upper half of a float32
    float8 e4m3    uint8    each code stands for a float32, by a table of 256
    float8 e5m2    int8     the same; signed only to be distinguishable

The behavior of a function depends on the dtype of its array argument, so a kernel for float32 contains no rounding.
"""

from typing import Any

import llvmlite.ir
import numpy as np
import numpy.typing as npt
from numba.core import types as numba_types
from numba.extending import intrinsic, overload

from tandem_engine.kernels.cpu.pieces import kernel_piece_options

ir: Any = llvmlite.ir
types: Any = numba_types
_HIGH_HALF = 16
_JUST_BELOW_HALF = 0x7FFF

_QUIET = 0x40
"""Bit of a bfloat16 NaN that keeps it one when the rest of its mantissa is cut off."""


def widened(number: Any) -> Any:
    """A number of a model's dtype as float32. For compiled code, as are the others."""
    raise NotImplementedError("widened is for compiled code")


def narrowed(value: Any, like: Any) -> Any:
    """A float32 value as a number of the array `like`: to nearest, ties to even."""
    raise NotImplementedError("narrowed is for compiled code")


def cut(value: Any, like: Any) -> Any:
    """As `narrowed`, of a value that needs no rounding."""
    raise NotImplementedError("cut is for compiled code")


def rounded(value: Any, like: Any) -> Any:
    """A float32 value as it is after a stay in the array `like`."""
    raise NotImplementedError("rounded is for compiled code")


@intrinsic  # type: ignore[untyped-decorator]
def _from_bfloat16(typing_context: Any, number: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, _HIGH_HALF))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _cut_to_bfloat16(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        word = ir.IntType(32)
        bits = builder.lshr(builder.bitcast(arguments[0], word), ir.Constant(word, _HIGH_HALF))
        return builder.trunc(bits, ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _to_bfloat16(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        high = builder.lshr(bits, ir.Constant(word, _HIGH_HALF))
        odd = builder.and_(high, ir.Constant(word, 1))
        up = builder.add(builder.add(bits, ir.Constant(word, _JUST_BELOW_HALF)), odd)
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        kept = builder.select(
            is_nan,
            builder.or_(high, ir.Constant(word, _QUIET)),
            builder.lshr(up, ir.Constant(word, _HIGH_HALF)),
        )
        return builder.trunc(kept, ir.IntType(16))

    return types.uint16(types.float32), generate


# numba requires the same signature, annotations included, of the stub, the chooser and the choices.
def _same(number: Any) -> Any:
    return number


def _widen(number: Any) -> Any:
    return _from_bfloat16(number)


def _keep(value: Any, like: Any) -> Any:  # noqa: ARG001
    return value


def _narrow(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _to_bfloat16(value)


def _cut(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _cut_to_bfloat16(value)


def _round(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _from_bfloat16(_to_bfloat16(value))


@overload(widened, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _widened_of_dtype(number: Any) -> Any:
    return _same if number == types.float32 else _widen


@overload(narrowed, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _narrowed_of_dtype(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _keep if like.dtype == types.float32 else _narrow


@overload(cut, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _cut_of_dtype(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _keep if like.dtype == types.float32 else _cut


@overload(rounded, jit_options=kernel_piece_options())  # type: ignore[untyped-decorator]
def _rounded_of_dtype(value: Any, like: Any) -> Any:  # noqa: ARG001
    return _keep if like.dtype == types.float32 else _round


def bits_of_codes(exponent_bits: int, *, has_infinity: bool) -> npt.NDArray[np.uint32]:
    """uint32 [256]: the bits of the float32 that each code of a float8 type stands for, infinities and NaN included.

    `has_infinity`: codes whose exponent bits are all set are infinities and NaN, as in e5m2; else the last one alone is
    NaN, as in e4m3.
    """
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    scale = np.maximum(exponent, 1) - (1 << exponent_bits - 1) + 1 - mantissa_bits
    numbers = np.ldexp((mantissa + (exponent > 0) * (1 << mantissa_bits)).astype(np.float32), scale)
    special = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        numbers[special] = np.where(mantissa[special] == 0, np.inf, np.nan)
    else:
        numbers[special & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    bits: npt.NDArray[np.uint32] = numbers.view(np.uint32) | (codes >> 7 << 31).astype(np.uint32)
    return bits
