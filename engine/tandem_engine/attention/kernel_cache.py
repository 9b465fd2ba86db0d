"""Where numba keeps the code of kernels that are called from threads which know nothing of Python.

numba finds code again by the constants that a function closes over. Among them may be functions that are compiled with
it, and of those it takes an identity that is another in each process: such a kernel would be compiled at every start,
for ten seconds, and its code kept each time. Here they do not count. What tells their code apart has to be among the
constants: `revision_of` their sources, and the numbers that they were made for.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.extending import is_jitted

from tandem_engine.code_files import CodeFiles


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
