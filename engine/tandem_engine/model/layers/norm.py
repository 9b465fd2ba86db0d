"""Root-mean-square normalisation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import NormKind

Norm = Callable[[Tensor], Tensor]
"""Normalises the last dimension; same shape and dtype."""


def rms_norm(weight: Tensor, *, eps: float, kind: NormKind) -> Norm:
    """The norm of a stored weight, broadcast against its input: [hidden], or [heads, head_dim]."""
    if kind is NormKind.UNIT_OFFSET:
        return OffsetRmsNorm(weight=1 + weight.float(), eps=eps)
    return RmsNorm(weight=weight, eps=eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    The mean and the division are float32 whatever the dtype of x, and the result is rounded to that dtype
    before the weight is applied: the order of transformers, so that bfloat16 rounds alike.
    """

    weight: Tensor
    """Broadcast against x: [hidden], or [heads, head_dim] where heads have different weights."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x; same shape and dtype."""
        return F.rms_norm(x, x.shape[-1:], eps=self.eps).mul_(self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffsetRmsNorm:
    """As `RmsNorm`, but the weight is applied in float32, and only the result is rounded."""

    weight: Tensor
    """float32: 1 + the stored weight."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x; same shape and dtype."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)
