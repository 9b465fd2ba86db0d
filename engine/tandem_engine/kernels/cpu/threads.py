"""Threads that compute one piece of compiled work together, and the tasks that they share.

Work is a compiled function of one address, `void work(void *)`, that takes tasks from a shared counter until none is
left. A thread that arrives late finds no task, so neither the number of threads nor their timing matters.

On Linux they are the threads of torch's OpenMP runtime (`OpenMpTeam`). These are awake, because they have just computed
the operation before; another pool would have to wake up while they still spin on its cores. Where that runtime is not
found the threads are Python's (`PythonTeam`), which wake in about 50 µs.

For compiled code, a *phase* is a number of tasks that any thread may take, from a counter that begins at 0. One phase
follows another:

    while a task is left: take it, compute it, report it finished
    wait until all tasks of the phase are finished, on any thread

Threads are not counted, so any number of them gives the same result, and a thread that arrives late or never does not
delay the others: its tasks are taken by them. A thread that has a task and is not scheduled does delay them; they yield
their cores then.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import llvmlite.ir
import numba
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic

from tandem_engine.kernels.cpu.pieces import Array, inlined

Work = Callable[[int], None]
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NO_FLAGS = 0


class Team(Protocol):
    def run(self, work: int, data: int, threads: int) -> None:
        """Have up to `threads` threads, the caller's among them, call the function at `work` with the address `data`.

        Returns when all of them have. The interpreter lock is free during the call.
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
    """Threads of an executor next to the calling one."""

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
    import torch  # noqa: F401  it loads the OpenMP runtime

    runtime = _openmp()
    return PythonTeam() if runtime is None else OpenMpTeam(runtime)


def _openmp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, if it has; another copy of it would have separate threads."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


ir: Any = llvmlite.ir
types: Any = numba_types

PHASE_BYTES = 128
"""Of a phase's two int64 counters, tasks taken and finished: a cache line each. Both begin at 0."""

_FINISHED = 64

_SPINS = 2000
"""Polls of the other threads' progress, some 30 µs, before a waiting thread yields its core."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_HAS_PAUSE = platform.machine() in ("x86_64", "AMD64")


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any, kind: Any) -> Any:  # noqa: ARG001
    """An address as a pointer to numbers of a type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    number = kind.dtype if isinstance(kind, types.NumberClass) else kind
    return types.CPointer(number)(address, kind), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(typing_context: Any, counter: Any) -> Any:  # noqa: ARG001
    """The int64 at a pointer or address, which is one more afterwards. No two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return _count(builder, arguments[0], "monotonic")

    return types.int64(counter), generate


@inlined
def finish(phase: int) -> None:
    """One more task of the phase at an address is finished; what it wrote is visible to waiting threads."""
    _finish(phase + _FINISHED)


@inlined
def is_open(phase: int, tasks: int) -> bool:
    """Whether some of a phase's tasks may be left to take."""
    return _look(phase) < tasks  # type: ignore[no-any-return]


@inlined
def wait(phase: int, tasks: int) -> None:
    """Until all of a phase's tasks are finished."""
    looks = 0
    while _look(phase + _FINISHED) < tasks:
        looks += 1
        if looks > _SPINS:
            _sched_yield()
        else:
            _pause()


@inlined
def array_at(address: int, shape: Any, kind: Any) -> Array:
    """The dense array of numbers of a type at an address."""
    return numba.carray(pointer(address, kind), shape)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _finish(typing_context: Any, counter: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        _count(builder, arguments[0], "release")
        return context.get_dummy_value()

    return types.void(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _look(typing_context: Any, counter: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(_place(builder, arguments[0]), "acquire", 8)

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typing_context: Any) -> Any:  # noqa: ARG001
    """Mark a waiting loop for the CPU, where it has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _count(builder: Any, counter: Any, ordering: str) -> Any:
    return builder.atomic_rmw("add", _place(builder, counter), ir.Constant(ir.IntType(64), 1), ordering)


def _place(builder: Any, counter: Any) -> Any:
    """A pointer or an address as a pointer to an int64."""
    kind = ir.IntType(64).as_pointer()
    if isinstance(counter.type, ir.IntType):
        return builder.inttoptr(counter, kind)
    return builder.bitcast(counter, kind)
