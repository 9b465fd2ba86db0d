"""What the device does at best, measured in this run: every other figure is a fraction of one of these."""

from dataclasses import dataclass

import torch

from gpu.stopwatch import Stopwatch

COPIED_BYTES = 2 << 30
SIDE = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Of one device and one dtype of numbers."""

    copy_bytes_per_s: float
    """Of `copy_`: bytes read and bytes written."""
    matmul_flops: float
    """Of a square product by torch, in the dtype: multiplications and additions per second."""


def measure(watch: Stopwatch, dtype: torch.dtype, *, tiny: bool) -> Ceilings:
    """`tiny`: sizes that a CPU can do, to try the programs."""
    size, side = (1 << 20, 128) if tiny else (COPIED_BYTES, SIDE)
    both = torch.empty((2, size), dtype=torch.uint8, device=watch.device)
    copy_s = watch.seconds(lambda: both[1].copy_(both[0]))
    a, b = (torch.randn((side, side), device=watch.device).to(dtype) for _ in range(2))
    matmul_s = watch.seconds(lambda: a @ b)
    return Ceilings(copy_bytes_per_s=2 * size / copy_s, matmul_flops=2 * side**3 / matmul_s)
