"""Forbids tokens: a packed mask makes logits −inf.

The mask says which row of the logits each of its rows is for. Nothing is inferred from order or count, so a
batch in which few have a grammar, or one has several positions, cannot mix them up [mask-per-row].
"""

import numpy as np
import torch
from torch import Tensor

from tandem_engine.forward.token_masks import TokenMasks


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Put −inf into `logits` [S, V] float wherever a row's mask forbids the token, in place.

    Waits until the masks are there. Raises `MasksLateError` when they do not come.
    """
    forbidden = _forbidden(masks.wait(), logits.shape[1])
    if masks.rows == (*range(len(logits)),):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = torch.tensor(masks.rows)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _forbidden(bitmask: Tensor, vocab_size: int) -> Tensor:
    """bool [G, vocab_size] of a packed mask [G, words]; tokens beyond its words are forbidden."""
    clear = np.invert(bitmask.numpy())
    bits = np.unpackbits(clear.view(np.uint8), axis=1, bitorder="little")
    missing = max(0, vocab_size - bits.shape[1])
    if missing:
        bits = np.pad(bits, ((0, 0), (0, missing)), constant_values=1)
    return torch.from_numpy(bits[:, :vocab_size]).view(torch.bool)
