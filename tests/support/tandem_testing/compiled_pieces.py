"""Pieces of kernels on their own: inlined where they are used, they cannot be called by Python code."""

from collections.abc import Callable
from typing import Any

import numba


def calling(piece: Callable[..., Any]) -> Any:
    """A compiled function that calls `piece`, which takes and returns what `piece` does."""

    def call(*arguments: Any) -> Any:
        return piece(*arguments)

    return numba.njit(call)
