"""Root-mean-square normalization."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import NormKind
from tandem_engine.kernels.interface import by_triton


class Norm(Protocol):
    """Normalises the last dimension."""

    @property
    def weight(self) -> Tensor:
        """Broadcast against the input; float32 when it is applied before rounding."""
        ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor:
        """A tensor of the shape and dtype of x."""
        ...

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and normalise the sum."""
        ...


def rms_norm(weight: Tensor, *, eps: float, kind: NormKind) -> Norm:
    """The norm of a stored weight, broadcast against its input: [hidden], or [heads, head_dim]."""
    match kind:
        case NormKind.PLAIN:
            scale = weight
        case NormKind.UNIT_OFFSET:
            scale = 1 + weight.float()
        case NormKind.ROUND_LAST:
            scale = weight.float()
    if by_triton(weight.device):
        from tandem_engine.model.layers.triton import DeviceRmsNorm

        return DeviceRmsNorm(weight=scale.contiguous(), eps=eps)
    return RmsNorm(weight=scale, eps=eps) if kind is NormKind.PLAIN else LateRoundingRmsNorm(weight=scale, eps=eps)


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
        """See `Norm`."""
        return F.rms_norm(x, x.shape[-1:], eps=self.eps).mul_(self.weight)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """See `Norm.of_sum`."""
        return self(hidden.add_(delta))


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRoundingRmsNorm:
    """As `RmsNorm`, but the weight is applied in float32, and only the result is rounded."""

    weight: Tensor
    """float32: the stored weight, or 1 + it."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """See `Norm.of_sum`."""
        return self(hidden.add_(delta))
