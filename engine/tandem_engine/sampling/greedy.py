"""The best token of each row of logits.

torch looks for the place of a maximum number by number, which takes as long for 64 rows as half a layer of a small
model. The maximum itself it finds by vectors, and compiled code then finds its place, a block of numbers at a time.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.compiled import COMPILES, compiled

BLOCK = 256
"""Logits that are compared before anybody asks whether one of them was it."""


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V] float32: the largest one [R], and the first id [R] int64 that has it.

    NaN counts as the largest; the id is then that of none in particular.
    """
    if not COMPILES or logits.device.type != "cpu":
        best, token_ids = logits.max(dim=1)
        return best, token_ids
    best = logits.amax(dim=1)
    token_ids = torch.zeros(len(logits), dtype=torch.int64)
    _find(logits.contiguous().numpy(), best.numpy(), token_ids.numpy())
    return best, token_ids


def _find_in_blocks(
    logits: npt.NDArray[np.float32], best: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64]
) -> None:
    """token_ids[row] = the first place of best[row] in its row, if it is anywhere."""
    for row in range(logits.shape[0]):
        wanted = best[row]
        for first in range(0, logits.shape[1], BLOCK):
            block = logits[row, first : first + BLOCK]
            hits = 0
            for i in range(block.shape[0]):
                hits += block[i] == wanted
            if hits > 0:
                place = 0
                while block[place] != wanted:
                    place += 1
                token_ids[row] = first + place
                break


_find = compiled(_find_in_blocks)
