"""Functions compiled by numba, their code kept on disk where possible.

An engine on a GPU needs few of them, and rarely: without numba they are interpreted, with the same results. The kernels
of an engine on a CPU require numba (`model.attention.cpu`).
"""

from collections.abc import Callable
from typing import Any

try:
    import numba

    from tandem_engine.kernels.cpu.kept import KeptDispatcher
except ModuleNotFoundError:
    numba = None

COMPILES = numba is not None
"""Whether functions are compiled at all."""


def compiled(function: Callable[..., Any], *, nogil: bool = True, **options: Any) -> Any:
    """`numba.njit` for Python code, with the code kept on disk, or in memory alone where no folder can be written.

    `nogil`: release the interpreter lock during the call. To acquire it again may take as long as another thread runs.
    The code is found again by the types of the arguments, the file of `function` and those of this folder: constants
    and functions that become part of the code stand there.
    """
    return function if numba is None else KeptDispatcher(function, {"nogil": nogil, **options})


def piece(function: Callable[..., Any], **options: Any) -> Any:
    """`numba.njit` for other compiled code, whose code becomes part of theirs."""
    return function if numba is None else numba.njit(**options)(function)
