"""How kernels of a CPU, and the pieces that they are made of, are compiled and cached.

numba finds cached code by the constants that a function closes over. For functions among them that are compiled with
it, numba uses an identity that differs in each process: such a kernel would be compiled at every start, for ten
seconds, and cached each time. Here functions are left out of the key. The constants that remain must identify the code:
`revision_of` the sources, and the numbers that it was made for.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy.typing as npt
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.extending import is_jitted

from tandem_engine.kernels.cpu.code_files import CodeFiles
from tandem_engine.kernels.cpu.jit import compiled


class _ByConstants(CodeFiles):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        contents = (cell.cell_contents for cell in function.__closure__ or ())
        constants = dumps(tuple(value for value in contents if not is_jitted(value)))
        self._made_of = hashlib.sha256(function.__code__.co_code + constants).hexdigest()

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._made_of


class _Kernel(CFunc):
    def enable_caching(self) -> None:
        self._cache = _ByConstants(self.__wrapped__)


def kept_callback(function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> Any:
    """`numba.cfunc`, compiled at once, its code kept on disk.

    Raises `RuntimeError` where no folder for it can be written.
    """
    kernel = _Kernel(function, sigutils.normalize_signature(signature), locals={}, options=options)
    kernel.enable_caching()
    kernel.compile()
    return kernel


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
