"""Arithmetic that digests of pages share: numbers modulo 2^64, the same compiled for a CPU, in torch, and in Triton.

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), a
bijection. torch has no unsigned integers to calculate with: there the bits are those of signed ones.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tandem_engine.compiled import compiled
from tandem_engine.memory.pool import PageLayout

Words = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of `mix`."""

_FIRST, _SECOND = np.uint64(FIRST), np.uint64(SECOND)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def word_bytes(layout: PageLayout) -> int:
    """Bytes of the words that are read: the most, up to 8, that divide a row."""
    return next(size for size in (8, 4, 2, 1) if layout.row_bytes % size == 0)


def _mix_word(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


mix = compiled(_mix_word, inline="always")
"""`_mix_word` for compiled callers."""


def mix_torch(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as if unsigned."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def signed(constant: int) -> int:
    """The 64-bit integer with the bits of an unsigned one."""
    return constant - (1 << 64) if constant >> 63 else constant


def widened(words: Tensor) -> Tensor:
    """Words of any width as int64, as if they were unsigned."""
    bits = 8 * words.dtype.itemsize
    return words.long() if bits == 64 else words.long() & ((1 << bits) - 1)
