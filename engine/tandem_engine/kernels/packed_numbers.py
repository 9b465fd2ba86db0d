"""Codes of a `PackedWeight` as numbers, in registers.

No instruction converts integers: a code in the mantissa of 2^23 is the float32 number 2^23 + code, and one subtraction
leaves code − zero. e4m3 needs no type of the device: it is a float16 with its exponent moved. All of it is exact.

Source: numbers in the mantissa of a power of two, as FasterTransformer (arXiv 2211.10017, 3) and Marlin (arXiv
2408.11743) have them.
"""

import triton
import triton.language as tl


@triton.jit
def from_integer(codes, zeros):
    """code − zero, exact in float32, for codes below 2^23; int32 [N, K], float32 [N]."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)[:, None]


@triton.jit
def from_upper_half(bytes_, zeros):
    """(byte >> 4) − zero; the four bits stay where they are, which makes a number of sixteenths."""
    sixteenths = ((bytes_ & 0xF0) | 0x4B000000).to(tl.float32, bitcast=True)
    return sixteenths * 0.0625 - (zeros + 524288.0)[:, None]


@triton.jit
def from_float8(codes):
    """e4m3 to float32, exact: its bits are those of a float16 2^8 times as small, subnormal ones included."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def zeros_of(zeros, group, output, live, outputs, MIDDLE: tl.constexpr, N: tl.constexpr):
    """float32 [N] zero points of a group."""
    if MIDDLE >= 0:
        return tl.full((N,), MIDDLE, tl.float32)
    return tl.load(zeros + group * outputs + output, mask=live, other=0).to(tl.float32)


@triton.jit
def scales_of(scales, group, output, live, outputs):
    """float32 [N, 1] scales of a group."""
    return tl.load(scales + group * outputs + output, mask=live, other=0.0).to(tl.float32)[:, None]
