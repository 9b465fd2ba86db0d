"""bfloat16 in Triton's interpreter as devices have it.

The interpreter keeps bfloat16 as the integer of its bits. It cuts float32 off where devices round to nearest even, and
multiplies the integers where a product should be. This puts both right, for the process it is installed in.
"""

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Replace the interpreter's conversion to bfloat16 and its products of it."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        return TensorHandle(_rounded(src.data), dst_type.scalar)

    def create_dot(self, a, b, *rest):
        return dot(self, _widened(a), _widened(b), *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot


def _rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
