"""Where the largest number of each row is, for `sampling.sampler.best_tokens`."""

import numpy as np
import numpy.typing as npt

from tandem_engine.kernels.cpu.jit import compiled

BLOCK = 256
"""Logits that are compared before it is checked whether one of them is the largest."""


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


find_in_blocks = compiled(_find_in_blocks)
