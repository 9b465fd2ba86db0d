"""Gumbel noise without a generator, in registers: what `sampling.noise` computes, for a token and a row's key.

    key    = splitmix64's finaliser over seed · a + position · b              once a row
    bits   = murmur3's finaliser over (hash of token id, key)                 31 bits, equal to the CPU's
    gumbel = −log(−log(1 − u)),  u = (bits + ½) / 2³¹

The bits are equal to the CPU's. Logarithms are not alike on any two libraries, so here they are made of IEEE
additions and multiplications alone, with nothing contracted (launch with `enable_fp_fusion=False`): every device and
the interpreter get the same noise to the bit. It is within 2e-6 of the CPU's, whose logarithms are torch's; a choice
differs where two tokens are nearer to each other than that.

Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014; Appleby, MurmurHash3; Moshier, Cephes
(the polynomial of `natural_log`).
"""

import triton
import triton.language as tl

GOLDEN = 0x9E3779B97F4A7C15
SEED_STEP = 0xD1342543DE82EF95
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
FMIX = (0x85EBCA6B, 0xC2B2AE35)
"""As `sampling.noise` has them, unsigned."""

_GOLDEN, _SEED_STEP = tl.constexpr(GOLDEN), tl.constexpr(SEED_STEP)
_MIX1, _MIX2 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])
_FMIX1, _FMIX2 = tl.constexpr(FMIX[0]), tl.constexpr(FMIX[1])
_LARGEST_U = tl.constexpr(1.0 - 2.0**-24)
_HALF_STEP = tl.constexpr(2.0**-31)
_ROOT_HALF = tl.constexpr(0.70710678118654752)
_LN2_HIGH, _LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """uint64 of int64 seed and position."""
    return _mix64(seed.to(tl.uint64, bitcast=True) * _SEED_STEP + position.to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def noise_bits(key, token):
    """int32 [0, 2³¹) of a row's key and non-negative token ids."""
    bits = _mix64(token.to(tl.uint64) + _GOLDEN).to(tl.uint32) ^ key.to(tl.uint32)
    bits = ((bits ^ (bits >> 16)) * _FMIX1) ^ (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * _FMIX2
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _log_near_one(z, exponent):
    """log((1 + z) · 2^exponent) for 1 + z in [√½, √2]."""
    squared = z * z
    y = 7.0376836292e-2 * z - 1.1514610310e-1
    y = y * z + 1.1676998740e-1
    y = y * z - 1.2420140846e-1
    y = y * z + 1.4249322787e-1
    y = y * z - 1.6668057665e-1
    y = y * z + 2.0000714765e-1
    y = y * z - 2.4999993993e-1
    y = y * z + 3.3333331174e-1
    y = y * z * squared + exponent * _LN2_LOW - 0.5 * squared
    return z + y + exponent * _LN2_HIGH


@triton.jit
def _split(x):
    """Mantissa in [√½, √2) and exponent of a positive normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < _ROOT_HALF
    return tl.where(low, mantissa + mantissa, mantissa), tl.where(low, exponent - 1, exponent).to(tl.float32)


@triton.jit
def natural_log(x):
    """log of a positive normal float32."""
    mantissa, exponent = _split(x)
    return _log_near_one(mantissa - 1.0, exponent)


@triton.jit
def gumbel(bits):
    """float32 of 31 random bits, between −2.9 and 22.2."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * _HALF_STEP, _LARGEST_U)
    mantissa, exponent = _split(1.0 - u)
    # Near 1 the difference has lost what u still has.
    small = exponent == 0.0
    exponential = 0.0 - _log_near_one(tl.where(small, 0.0 - u, mantissa - 1.0), exponent)
    return 0.0 - natural_log(exponential)
