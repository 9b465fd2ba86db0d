"""Float8 pools of K and V: what a number becomes when it is stored, and the scales that bring it into range.

    stored  = nearest(clamp(x / scale, ±largest))        read back as  stored · scale

with a scale for each K/V head, ties to even, and NaN left as it is. The kernels (`store_kv`, `rope_store`) store the
same bits; this is their twin for a CPU, and needs no Triton.

Source: the E4M3 and E5M2 formats of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022, arXiv 2209.05433).
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class KvScales(NamedTuple):
    """What K and V of one layer are divided by before they are stored, float32 [KV] each."""

    k: Tensor
    v: Tensor


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., KV, D] of any float dtype as `dtype` of float8; `scale` [KV]."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale[:, None]).clamp(-largest, largest).to(dtype)


def from_float8(x: Tensor, scale: Tensor) -> Tensor:
    """The inverse, float32; x [..., KV, D] of float8."""
    return x.float() * scale[:, None]
