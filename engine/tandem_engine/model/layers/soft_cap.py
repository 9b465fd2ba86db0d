"""Soft cap: values approach a bound smoothly instead of passing it."""

from torch import Tensor


def soft_cap_(values: Tensor, cap: float) -> Tensor:
    """cap · tanh(values / cap), in place."""
    return values.div_(cap).tanh_().mul_(cap)
