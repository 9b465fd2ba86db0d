"""Memory that was freed, and that the C library keeps for what may come.

Loading takes more than stays, for seconds. glibc gives the system back what lies at the end of a heap alone; the rest
would be this process's for as long as it lives.
"""

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Return to the system what this process has freed, where the C library can. Takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
