"""Adjacent pages as the address ranges that NIXL moves."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tandem_engine.kernels.cpu.jit import compiled

Pages: TypeAlias = npt.NDArray[np.uint64]

Ranges: TypeAlias = npt.NDArray[np.uint64]
"""[N, 3]: address, bytes, device id. NIXL reads such an array far faster than a list of tuples."""


def _merge_runs(
    sources: Pages, targets: Pages, here: np.uint64, there: np.uint64, page_bytes: np.uint64, ranges: Ranges
) -> int:
    """Fill address and bytes of `ranges` [2, N, 3]; returns how many of each side are used."""
    count = 0
    for i in range(len(sources)):
        if i > 0 and sources[i] == sources[i - 1] + np.uint64(1) and targets[i] == targets[i - 1] + np.uint64(1):
            ranges[0, count - 1, 1] += page_bytes
            ranges[1, count - 1, 1] += page_bytes
            continue
        ranges[0, count, 0] = here + sources[i] * page_bytes
        ranges[1, count, 0] = there + targets[i] * page_bytes
        ranges[0, count, 1] = ranges[1, count, 1] = page_bytes
        count += 1
    return count


merge_runs = compiled(_merge_runs)
