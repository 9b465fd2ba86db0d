"""Functions compiled by numba, their code kept on disk where possible.

An engine on a GPU needs few of them, and rarely: without numba they are interpreted, with the same results. The kernels
of an engine on a CPU require numba (`model.attention.cpu`).
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import numba

    from tandem_engine.kernels.cpu.code_files import CodeFiles
except ModuleNotFoundError:
    numba = None
logger = logging.getLogger(__name__)

COMPILES = numba is not None
"""Whether functions are compiled at all."""


def compiled(function: Callable[..., Any], *, nogil: bool = True, **options: Any) -> Any:
    """`numba.njit` with the code kept on disk, or in memory alone where no cache folder can be written.

    `nogil`: release the interpreter lock during the call. To acquire it again may take as long as another thread runs.
    numba knows the file of `function` alone: constants and functions that become part of the code stand there too.
    """
    if numba is None:
        return function
    kernel = numba.njit(nogil=nogil, **options)(function)
    try:
        kernel._cache = CodeFiles(function)
    except RuntimeError as error:
        # Read-only root file system and no writable home: numba finds "no locator available".
        logger.info("cannot cache compiled kernels, compiling at every start: %s", error)
    return kernel


def revision_of(*modules: ModuleType, constant: int = 0) -> int:
    """A number that changes with the source of `modules` and with `constant`, never 0.

    numba keeps compiled code by the file of the function and the constants that it closes over. A kernel that is
    made of pieces of other files closes over this, or it would be loaded as it was before they changed. `constant` is
    one of theirs that the machine decides.
    """
    digest = hashlib.blake2b(str(constant).encode(), digest_size=4)
    for module in modules:
        assert module.__file__ is not None, f"{module.__name__} has no file"
        digest.update(Path(module.__file__).read_bytes())
    return 1 + int.from_bytes(digest.digest())
