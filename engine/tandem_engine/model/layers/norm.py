"""Root-mean-square normalisation."""

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


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
