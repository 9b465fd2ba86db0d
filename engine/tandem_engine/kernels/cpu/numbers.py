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
import torch
from numba.core import types as numba_types
from numba.extending import intrinsic, overload
from torch import Tensor

from tandem_engine.kernels.cpu.pieces import Array, kernel_piece_options

ir: Any = llvmlite.ir
types: Any = numba_types
_HIGH_HALF = 16
_JUST_BELOW_HALF = 0x7FFF

_QUIET = 0x40
"""Bit of a bfloat16 NaN that keeps it one when the rest of its mantissa is cut off."""


def as_numbers(tensor: torch.Tensor) -> Array:
    """The memory of a dense float32 or bfloat16 tensor, as kernels see it."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """As kernels see it."""
    return np.dtype(np.uint16 if dtype is torch.bfloat16 else np.float32)


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


SEEN_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


def as_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as numpy sees it."""
    seen = SEEN_AS.get(tensor.dtype)
    array: npt.NDArray[np.generic] = (tensor if seen is None else tensor.view(seen)).numpy()
    return array


def bits_of_codes(dtype: torch.dtype) -> npt.NDArray[np.uint32]:
    """uint32 [256]: the bits of the float32 that each code of a type of 8 bits stands for."""
    bits: npt.NDArray[np.uint32] = torch.arange(256).to(torch.uint8).view(dtype).float().numpy().view(np.uint32)
    return bits
