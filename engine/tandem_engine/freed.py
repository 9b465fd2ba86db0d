"""Memory that was freed, and that the C library keeps for what may come.

Loading takes more than stays, for seconds, and the step of a long prompt more than that of a decode. glibc gives the
system back what lies at the end of a heap alone, so the rest is this process's for as long as it lives. A step soon
after another one is glad of it; an engine at rest needs none.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

REST_S = 2.0


def give_back() -> None:
    """Return to the system what this process has freed, where the C library can. Takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class AtRest:
    """Gives back once whenever nothing has been done for `REST_S`."""

    def __init__(self, give: Callable[[], None] = give_back) -> None:
        self._give = give
        self._since: float | None = None
        """When the rest began that nothing was given back in yet."""

    def turn(self, *, worked: bool, now: float) -> None:
        """Told of every turn of a loop; `now` in seconds."""
        if worked:
            self._since = now
        elif self._since is not None and now - self._since >= REST_S:
            self._since = None
            self._give()
