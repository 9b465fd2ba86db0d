"""Returns freed memory to the system.

Loading takes more than stays, for seconds, and the step of a long prompt more than that of a decode. glibc returns only
the end of a heap. A step soon after another one reuses the rest; an idle engine does not need it, and one whose
container is short of memory cannot afford it.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tandem_engine.base.cgroups import memory_groups
from tandem_engine.base.recording import recording

REST_S = 2.0

BUSY_S = 5.0
"""Between two looks at the container's memory while there is work."""

SHORT = 8
"""A container with less than one part in so many of its memory left is short of it."""


def short_of_memory() -> bool:
    """Whether a control group of this process is near its limit, at which the kernel kills."""
    return any(group.limit - group.used < group.limit // SHORT for group in memory_groups())


def give_back() -> None:
    """Return to the system what this process has freed, where the C library can. Takes milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)


@contextmanager
def lasting() -> Iterator[None]:
    """Around imports: what is made here stays as long as the process, so Python's collector neither looks for garbage
    in it now nor walks it later. Else that is a fifth of the CPU time of the imports of a gateway, a tenth of an
    engine's, and of an engine each further collection takes as long as reading its small model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class AtRest:
    """Gives back once whenever nothing has been done for `REST_S`, and at work while the container is short of memory.

    Between small long-lived allocations, as of compiled products, glibc keeps what it has freed: 0.1 GiB and more of
    temporary tensors, which count against the container's limit.
    """

    def __init__(self, give: Callable[[], None] = give_back, short: Callable[[], bool] = short_of_memory) -> None:
        self._give, self._short = give, short
        self._since: float | None = None
        """When the rest began that nothing was given back in yet."""
        self._looked = float("-inf")

    @recording
    def turn(self, *, worked: bool, now: float) -> None:
        """Called at every turn of a loop; `now` in seconds. Messages without a step are no work: pings never end."""
        if worked:
            self._since = now
            if now - self._looked >= BUSY_S:
                self._looked = now
                if self._short():
                    self._give()
        elif self._since is not None and now - self._since >= REST_S:
            self._since = None
            self._give()
