"""Numbers as a tensor of the model's dtype would hold them, without the tensor.

transformers computes a block operation by operation, each of which rounds its result to the model's dtype. A kernel
that fuses operations keeps float32 in registers and rounds at the same places, so that it gives the same tokens.
"""

import triton
import triton.language as tl

_FLOAT32_MANTISSA = tl.constexpr(23)
_INFINITY = tl.constexpr(0x7F800000)
"""Its bits; those of NaN are more."""


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """`x` in float32, rounded to DTYPE and back."""
    return x.to(DTYPE).to(x.dtype)


@triton.jit
def float8_code(x, DTYPE: tl.constexpr):
    """float32 `x`, at most DTYPE's largest number, as the nearest of float8, ties to even: what devices convert to.

    For Triton's interpreter, which cuts bits off instead.
    """
    MANTISSA: tl.constexpr = 2 if tl.float8e5 == DTYPE else 3
    LEAST_NORMAL: tl.constexpr = -14 if tl.float8e5 == DTYPE else -6
    DROPPED: tl.constexpr = _FLOAT32_MANTISSA - MANTISSA
    UNIT: tl.constexpr = 2**DROPPED
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + (UNIT // 2 - 1) + ((size // UNIT) & 1)) // UNIT - (126 + LEAST_NORMAL) * 2**MANTISSA
    # A float32 of this size has its last bit where numbers too small for a whole mantissa have theirs.
    BIG: tl.constexpr = 2.0 ** (LEAST_NORMAL + DROPPED)
    BIG_BITS: tl.constexpr = (127 + LEAST_NORMAL + DROPPED) * 2**_FLOAT32_MANTISSA
    small = (size.to(tl.float32, bitcast=True) + BIG).to(tl.int32, bitcast=True) - BIG_BITS
    code = tl.where(tl.abs(x) < 2.0**LEAST_NORMAL, small, normal)
    code = tl.where(size > _INFINITY, 0x7F, code) | tl.where(bits < 0, 0x80, 0)
    return code.to(tl.uint8).to(DTYPE, bitcast=True)
