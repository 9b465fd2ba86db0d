"""Token embedding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TokenEmbedding = Callable[[Tensor], Tensor]
"""[T] int64 to a fresh [T, hidden] that the caller may write to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Implements `TokenEmbedding`: rows of a [vocab, hidden] table."""

    weight: Tensor
    scale: Tensor | None = None
    """Factor of the rows, a scalar in the table's dtype: rounded as transformers rounds it."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale is None else rows.mul_(self.scale)
