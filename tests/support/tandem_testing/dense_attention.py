"""Attention over whole sequences without pages, plain enough to be trusted as a reference."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass
class DenseAttend:
    """An `Attend` that keeps K and V of every sequence as one growing tensor per layer.

    Set `extend_lens` before each forward: how many of its tokens belong to each sequence, in order.
    """

    extend_lens: list[int] = field(default_factory=list)
    cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(tensor.split(self.extend_lens) for tensor in (q, k, v)), strict=True)
        return torch.cat([self._attend(layer, sequence, *part) for sequence, part in enumerate(parts)])

    def _attend(self, layer: int, sequence: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (layer, sequence) in self.cache:
            past_k, past_v = self.cache[layer, sequence]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self.cache[layer, sequence] = (k, v)
        new, seen = q.shape[0], k.shape[0]
        visible = torch.ones(new, seen, dtype=torch.bool).tril(diagonal=seen - new)
        heads_first = (tensor.transpose(0, 1) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=True)
        return out.transpose(0, 1).reshape(new, -1)
