"""Threads that compute one piece of compiled work together.

Work is a compiled function of one address, `void work(void *)`, that takes tasks from a shared counter until none is
left. Whoever comes late finds nothing to do, so it does not matter how many threads come, or when.

On Linux they are the threads of torch's own OpenMP runtime. They are awake, for they have just computed the operation
before; any other pool would have to wake up beside them while they still spin on its cores. Where that runtime is not
to be found the threads are Python's, which wake in some 50 µs.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch  # noqa: F401  it loads the OpenMP runtime

Work = Callable[[int], None]
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NO_FLAGS = 0


class Team(Protocol):
    def run(self, work: int, data: int, threads: int) -> None:
        """Have up to `threads` threads, the caller's among them, call the function at `work` with the address `data`.

        Returns when all of them have. The interpreter lock is free meanwhile.
        """
        ...


class OpenMpTeam:
    """The threads with which torch computes for the calling thread."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        # What GCC makes of `#pragma omp parallel`: libgomp's ABI since 4.9.
        self._parallel: Any = runtime.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    def run(self, work: int, data: int, threads: int) -> None:
        self._parallel(work, data, threads, _NO_FLAGS)


class PythonTeam:
    """Threads of an executor beside the calling one."""

    def __init__(self) -> None:
        self._others = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="attention")

    def run(self, work: int, data: int, threads: int) -> None:
        call = _WORK(work)
        others = [self._others.submit(call, data) for _ in range(threads - 1)]
        call(data)
        for other in others:
            other.result()


@cache
def team() -> Team:
    """Of this process."""
    runtime = _openmp()
    return PythonTeam() if runtime is None else OpenMpTeam(runtime)


def _openmp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, if it has; another copy of it would have threads of its own."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
