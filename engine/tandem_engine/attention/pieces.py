"""How kernels of a CPU and the pieces that they are made of are compiled."""

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy.typing as npt

from tandem_engine.attention.kernel_cache import kept_callback
from tandem_engine.compiled import compiled

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# Sums may be reordered and contracted, else a dot product stays scalar. NaN and inf keep their meaning.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}


def compiled_kernel(function: Callable[..., Any], **extra: Any) -> Any:
    """A kernel, which Python code may call."""
    return compiled(function, **_OPTIONS, **extra)


def compiled_callback(function: Callable[..., Any], signature: Any) -> Any:
    """A kernel that other compiled code may call by its `address`, on threads that know nothing of Python."""
    try:
        return kept_callback(function, signature, _OPTIONS)
    except RuntimeError as error:
        # As in `compiled`: there is nowhere to keep it.
        logger.info("kernels are compiled anew at every start: %s", error)
        return numba.cfunc(signature, **_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A piece of a kernel, expanded where it is called so that the caller's constants reach its loops."""
    return numba.njit(**kernel_piece_options())(function)


def compiled_piece(function: Callable[..., Any]) -> Any:
    """A piece of a kernel that is large enough to be called."""
    return numba.njit(nogil=True, **_OPTIONS)(function)


def kernel_piece_options() -> dict[str, Any]:
    """For an `overload` that is to be such a piece."""
    return {**_OPTIONS, "nogil": True, "forceinline": True}
