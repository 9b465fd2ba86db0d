"""Noise without a generator: a pure function of (seed, position, token id).

The same request draws the same noise at the same position on any worker, in any batch, after any
retraction or resumption, so the output that is resumed is the output that would have been.

    key  = splitmix64's finaliser over seed · a + position · b     64 bits per sampled position
    bits = murmur3's finaliser over (hash of token id, key)        31 bits per token
    gumbel = −log(−log(1 − u)),  u = (bits + ½) / 2³¹

argmax(log p + gumbel) is distributed as p. Winners come from small u, where float32 is at its
finest: even a token of probability 1e-9 is drawn as often as it should be.

All arithmetic is on signed integers that wrap around, which every torch device has.
"""

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the increment of splitmix64
# Odd, and so far from small multiples of the other that no two small seeds meet: 0xD1342543DE82EF95, of an LCG.
_SEED_STEP = -0x2ECBDABC217D106B
_MIX1, _MIX2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FMIX1, _FMIX2 = -0x7A143595, -0x3D4D51CB  # 0x85EBCA6B, 0xC2B2AE35
_LARGEST_U = 1.0 - 2.0**-24


def token_hashes(token_ids: Tensor) -> Tensor:
    """int64 token ids to int32 of the same shape: the part of the noise that is the same in every row."""
    return _mix64(token_ids + _GOLDEN).to(torch.int32)


def gumbel(seed: Tensor, position: Tensor, hashes: Tensor) -> Tensor:
    """Noise of the tokens behind `hashes`.

    Args:
        seed, position: [S] int64.
        hashes: [V] for the same tokens in every row, or [S, C] for each row's own.

    Returns:
        float32 [S, V] or [S, C], between −2.9 and 22.2.
    """
    key = _mix64(seed * _SEED_STEP + position * _GOLDEN)[:, None]
    bits = hashes ^ key.to(torch.int32)
    _scramble(bits, (key >> 32).to(torch.int32))
    u = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def _scramble(bits: Tensor, key: Tensor) -> None:
    """fmix32 in place, with the other half of the key between its multiplications."""
    bits.bitwise_xor_(_shift_right(bits, 16, width=32)).mul_(_FMIX1).bitwise_xor_(key)
    bits.bitwise_xor_(_shift_right(bits, 13, width=32)).mul_(_FMIX2)
    bits.bitwise_xor_(_shift_right(bits, 16, width=32))


def _mix64(x: Tensor) -> Tensor:
    """The output function of splitmix64."""
    x = (x ^ _shift_right(x, 30, width=64)) * _MIX1
    x = (x ^ _shift_right(x, 27, width=64)) * _MIX2
    return x ^ _shift_right(x, 31, width=64)


def _shift_right(x: Tensor, count: int, *, width: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (x >> count).bitwise_and_((1 << (width - count)) - 1)
