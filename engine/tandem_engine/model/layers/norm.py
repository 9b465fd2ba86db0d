"""Normalization: by the root of the mean square, of rows or of all heads of q and of k, and LayerNorm."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import NormKind
from tandem_engine.kernels.interface import by_triton
from tandem_engine.parallel.group import SingleRank, TpGroup


class Norm(Protocol):
    """Normalizes the last dimension."""

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
        """Add `delta` to `hidden` in place, and normalize the sum."""
        ...


def rms_norm(weight: Tensor, *, eps: float, kind: NormKind) -> Norm:
    """The norm of a stored weight, broadcast against its input: [hidden], or [heads, head_dim]."""
    scale = scale_of(weight, kind)
    if kind is NormKind.CENTERED:
        return CenteredNorm(weight=scale, eps=eps)
    if by_triton(weight.device):
        from tandem_engine.model.layers.triton import DeviceRmsNorm

        return DeviceRmsNorm(weight=scale.contiguous(), eps=eps)
    return RmsNorm(weight=scale, eps=eps) if kind is NormKind.PLAIN else LateRoundingRmsNorm(weight=scale, eps=eps)


def scale_of(weight: Tensor, kind: NormKind) -> Tensor:
    """The factor that a stored weight means; float32 where it is applied before rounding."""
    if kind is NormKind.PLAIN:
        return weight
    return 1 + weight.float() if kind is NormKind.UNIT_OFFSET else weight.float()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CenteredNorm:
    """LayerNorm without bias: as `LateRoundingRmsNorm`, after the mean was subtracted. By torch on any device."""

    weight: Tensor
    """float32"""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """See `Norm.of_sum`."""
        return self(hidden.add_(delta))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoNorm:
    """Implements `Norm` for blocks that read the hidden states as they are."""

    weight: Tensor = field(default_factory=lambda: torch.ones(()))
    eps: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """`x` itself, which the block must not change."""
        return x

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """`hidden` itself."""
        return hidden.add_(delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeHeadsNorm:
    """RMS norm of all query heads of a token as one row, and of all its key heads as another. By torch on any device.

    A rank has some of the heads. All ranks have equally many, so the mean over all heads is the mean over the ranks,
    also where several ranks have the same key heads.
    """

    weight: Tensor
    """[H + KV, D] of this rank's heads, q's first; float32 when it is applied before rounding."""
    eps: float
    num_heads: int
    """H"""
    group: TpGroup = field(default_factory=SingleRank)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H + KV, D]"""
        wide = x.float()
        squares = wide.square().mean(dim=-1)
        parts = squares.split_with_sizes((self.num_heads, squares.shape[1] - self.num_heads), dim=1)
        means = torch.stack([part.mean(dim=1) for part in parts], dim=1)
        if self.group.size > 1:
            means = self.group.all_reduce(means) / self.group.size
        scales = torch.cat([means[:, i : i + 1].expand_as(part) for i, part in enumerate(parts)], dim=1)
        normed = wide * (scales + self.eps).rsqrt()[..., None]
        return (normed if self.weight.dtype is torch.float32 else normed.to(x.dtype)).mul(self.weight).to(x.dtype)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """See `Norm.of_sum`."""
        return self(hidden.add_(delta))
