"""Tensors of checks: random ones, those of a batch on another device, how far two are apart, the device that computes
them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tandem_engine.kernels import interface

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def units_apart(found: Tensor, expected: Tensor, *, at_least: float = 0.0) -> float:
    """The largest distance, in units that numbers of `expected` have; smaller numbers count as `at_least`."""
    assert found.dtype is expected.dtype, f"{found.dtype} where {expected.dtype} is expected"
    assert found.shape == expected.shape, f"{tuple(found.shape)} where {tuple(expected.shape)} is expected"
    reference = expected.double().cpu()
    distance = (found.double().cpu() - reference).abs()
    size = reference.abs().clamp(min=max(at_least, 1e-30)).log2().floor()
    return float((distance / 2.0 ** (size - MANTISSA_BITS[expected.dtype])).max()) if found.numel() else 0.0


def random_floats(*shape: int, seed: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same on every device."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(dtype).to(device)


def to_device(value: Any, device: str) -> Any:
    """A dataclass with its tensors on `device`."""
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)})


@contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Have what lies on `device` be computed by kernels."""
    devices = interface.TRITON_DEVICES
    interface.TRITON_DEVICES = devices | {torch.device(device).type}
    try:
        yield
    finally:
        interface.TRITON_DEVICES = devices
