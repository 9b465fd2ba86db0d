"""Rounding as a tensor of the model's dtype would have it, without the tensor; and facts about devices.

transformers computes a block operation by operation, each of which rounds its result to the model's dtype. A kernel
that fuses operations keeps float32 in registers and rounds at the same places, so that it gives the same tokens.
"""

from dataclasses import dataclass

import torch
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
    MIN_NORMAL: tl.constexpr = -14 if tl.float8e5 == DTYPE else -6
    DROPPED: tl.constexpr = _FLOAT32_MANTISSA - MANTISSA
    UNIT: tl.constexpr = 2**DROPPED
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + (UNIT // 2 - 1) + ((size // UNIT) & 1)) // UNIT - (126 + MIN_NORMAL) * 2**MANTISSA
    # A float32 of this size has its last bit where numbers too small for a whole mantissa have theirs.
    BIG: tl.constexpr = 2.0 ** (MIN_NORMAL + DROPPED)
    BIG_BITS: tl.constexpr = (127 + MIN_NORMAL + DROPPED) * 2**_FLOAT32_MANTISSA
    small = (size.to(tl.float32, bitcast=True) + BIG).to(tl.int32, bitcast=True) - BIG_BITS
    code = tl.where(tl.abs(x) < 2.0**MIN_NORMAL, small, normal)
    code = tl.where(size > _INFINITY, 0x7F, code) | tl.where(bits < 0, 0x80, 0)
    return code.to(tl.uint8).to(DTYPE, bitcast=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Of one device."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that a block may have."""


INTERPRETER = DeviceFacts(multiprocessors=2, shared_bytes=163 << 10)
"""What Triton's interpreter stands for: an A100, but for its size."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return bool(triton.knobs.runtime.interpret)


def facts_of(device: torch.device) -> DeviceFacts:
    """Of `device`; of the interpreter if it is no CUDA device."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceFacts(multiprocessors=properties["multiprocessor_count"], shared_bytes=properties["max_shared_mem"])
