"""Percentiles of samples."""

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest sample that `share` of all are not above. Raises `ValueError` without samples."""
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
