"""Small integers packed into words of 32 bits."""

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """Unsigned integers of `bits` bits each, int32, in the order in which `words` hold them: lowest bits first.

    `dim` becomes 32 / bits times as long.
    """
    dim %= words.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & ((1 << bits) - 1)
    return parts.flatten(dim, dim + 1)
