"""Functions compiled by numba, their code kept on disk where that is possible."""

import logging
from collections.abc import Callable
from typing import Any

import numba

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """`numba.njit` with the interpreter lock let go and the code kept on disk, or in memory alone where no cache
    folder can be written.
    """
    try:
        return numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError as error:
        # Read-only root file system and no writable home: numba finds "no locator available".
        logger.info("kernels are compiled anew at every start: %s", error)
        return numba.njit(cache=False, nogil=True, **options)(function)
