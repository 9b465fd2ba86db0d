"""How kernels of a CPU, and the pieces that they are made of, are compiled."""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from numba.core import registry

from tandem_engine.kernels.cpu.jit import compiled
from tandem_engine.kernels.cpu.kept import compiled_now

Array = npt.NDArray[Any]

# Sums may be reordered and contracted, else a dot product stays scalar. NaN and inf keep their meaning.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}
# Compiled code calls pieces. To let Python and C call them as well takes a quarter of the time to compile; a call
# from Python ends the process.
_PIECE: dict[str, Any] = {**_OPTIONS, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled_kernel(function: Callable[..., Any], **extra: Any) -> Any:
    """A kernel, which Python code may call."""
    return compiled(function, **_OPTIONS, **extra)


def compiled_callback(function: Callable[..., Any], signature: Any) -> Any:
    """What a builder returns to `kept`: a kernel that other compiled code may call by its address, on threads that know
    nothing of Python."""
    return compiled_now(function, signature, _OPTIONS)


class _Piece(registry.CPUDispatcher):  # type: ignore[misc]
    """Its text is part of the symbols of pieces that it is passed to, and the same in every process: that of numba has
    the address of the function. Pieces with equal names stay apart: each symbol has a number of its own, too.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(py_func=function, targetoptions={"nopython": True, "boundscheck": None, **options})

    def __repr__(self) -> str:
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}"


def inlined(function: Callable[..., Any]) -> Any:
    """A piece of a kernel, expanded where it is called so that the caller's constants reach its loops."""
    return _Piece(function, kernel_piece_options())


def compiled_piece(function: Callable[..., Any]) -> Any:
    """A piece of a kernel that is large enough to be called."""
    return _Piece(function, _PIECE)


def kernel_piece_options() -> dict[str, Any]:
    """For an `overload` that is to be such a piece."""
    return {**_PIECE, "forceinline": True}
