"""Where numba keeps compiled code on disk: separate files for each set of types that a function was compiled for.

By default numba keeps all code of one function in one index, with data files numbered in order. Two processes that
compile at the same time read the same index and use the same number, and from then on calls with one dtype run the code
of another. Here the name of a file follows from the types, so concurrent writers write the same content.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

from tandem_engine.base.progress import START


class CodeFiles(FunctionCache):  # type: ignore[misc]
    """numba's cache of one function. Raises `RuntimeError` where no folder for it can be written."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _FilesByKey(
            folder=self._cache_path,
            function=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FilesByKey:
    """Takes the place of one index of all keys. A key is a signature, a kind of CPU and a digest of the code."""

    folder: str
    function: str
    """Its module, name and line, and the Python version."""
    source_stamp: object
    """Of the sources at import: code of others is compiled again."""

    def load(self, key: object) -> Any:
        """What was saved for `key`, or None."""
        code = self._files_of(key).load(key)
        if code is None:
            START.kernel_missing()
        return code

    def save(self, key: object, data: object) -> None:
        self._files_of(key).save(key, data)
        START.kernel_compiled()

    def _files_of(self, key: object) -> Any:
        # numba's types are written with everything that distinguishes them.
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return IndexDataCacheFile(
            cache_path=self.folder,
            filename_base=f"{self.function}-{digest[:16]}",
            source_stamp=self.source_stamp,
        )
