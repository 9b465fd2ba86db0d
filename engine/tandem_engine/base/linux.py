"""What the engine uses of Linux: CPU lists, huge pages, death with the parent, private files, limits.

`parse_cpus`, `format_cpus` and `bind_thread` use lists such as `0-3,8`. Without binding, a thread is moved between
cores while it computes, at times to one where another worker's thread computes: both then take twice as long for some
milliseconds. Threads that a bound thread starts, such as its OpenMP team, stay on the same cores.

`to_huge_pages` moves memory to pages of 2 MiB. Weights are read from end to end for every token. With pages of 4 KiB
the processor translates a quarter of a million addresses per gigabyte, twice each on a virtual machine, and restarts
its prefetching each time. Linux moves written memory on request (`MADV_COLLAPSE`, since 6.1), unless huge pages are
off. Elsewhere it is asked to do so in the background. A request may stop at the first page that cannot be moved,
without a report, so it is made piece by piece.

`keep_files_private` keeps files with prompts, KV or keys for this user alone. A server process calls it first, so that
logs, dumps and traces, some of which libraries write, are private too. Code that also runs in a user's own process,
whose umask must not change, opens its files with `private_opener`.
"""

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any


def parse_cpus(text: str) -> tuple[int, ...]:
    """Ascending, each once. Raises `ValueError` for what is no list of CPUs."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        begin, end = _number(first), _number(last if dash else first)
        if end < begin:
            raise ValueError(f"{part!r} ends before it begins")
        cpus.update(range(begin, end + 1))
    return tuple(sorted(cpus))


def _number(text: str) -> int:
    """Few digits: Linux knows at most 8,192 CPUs."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ValueError(f"{text!r} is no number of a CPU")
    return int(text)


def format_cpus(cpus: Collection[int]) -> str:
    """What `parse_cpus` reads, without ranges."""
    return ",".join(map(str, sorted(cpus)))


def can_bind() -> bool:
    """Whether threads of this system can be kept on cores."""
    return hasattr(os, "sched_setaffinity")


def allowed_cpus() -> frozenset[int]:
    """That this process may use: fewer than there are under `taskset`, or with a set of cores of a container's own."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def bind_thread(cpus: Collection[int]) -> None:
    """Keep the calling thread, and those that it will start, on these cores; none leaves it where it may be."""
    if cpus:
        os.sched_setaffinity(0, cpus)


logger = logging.getLogger(__name__)

HUGE = 2 << 20
"""Bytes of a huge page of x86 and of most ARM machines."""

MAX_BETWEEN = 1 << 16
"""Bytes between two ranges that are moved with them."""

PIECE = 64 << 20
"""Bytes that the system is asked to move at a time: some tens of milliseconds."""

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

Range = tuple[int, int]
"""Address and bytes."""


def movable(ranges: Iterable[Range]) -> list[Range]:
    """What `to_huge_pages` can be given of `ranges`, see `whole_pages`. Nothing where huge pages are switched off."""
    return whole_pages(ranges) if _are_allowed() else []


def to_huge_pages(ranges: Iterable[Range], *, advance: Callable[[int], object] = lambda _: None) -> int:
    """Move what of `ranges` fills huge pages, where the system can. Takes a second per gigabyte or two.

    Args:
        advance: Called with the bytes of every piece once it was tried; together those of `movable`.

    Returns the bytes of pieces that were moved whole; what they hold stays. Their owner must keep them until then.
    """
    moved = 0
    for address, size in _pieces(movable(ranges)):
        advise(address, size, _MADV_HUGEPAGE)
        moved += size if advise(address, size, _MADV_COLLAPSE) else 0
        advance(size)
    if moved:
        logger.info("%d MiB of weights are in huge pages", moved >> 20)
    return moved


def prefer_huge_pages(address: int, size: int) -> bool:
    """Ask for huge pages where memory from `address` on, the beginning of a page, is used first. Kernels without them
    refuse; the memory is slower then, and as right."""
    return sys.platform.startswith("linux") and advise(address, size, _MADV_HUGEPAGE)


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """The huge pages within `ranges`. Those that nearly touch count as one: their neighbours are of the same heap."""
    joined: list[tuple[int, int]] = []
    for start, size in sorted(set(ranges)):
        if joined and start - joined[-1][1] <= MAX_BETWEEN:
            first, end = joined.pop()
            joined.append((first, max(end, start + size)))
        else:
            joined.append((start, start + size))
    inner = ((-(-start // HUGE) * HUGE, end // HUGE * HUGE) for start, end in joined)
    return [(start, end - start) for start, end in inner if start < end]


def _pieces(ranges: Iterable[Range]) -> Iterator[Range]:
    """Of `PIECE` bytes, the last of a range of what is left."""
    for start, size in ranges:
        for offset in range(0, size, PIECE):
            yield start + offset, min(PIECE, size - offset)


def _are_allowed() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:
        return False


def advise(address: int, size: int, advice: int) -> bool:
    """Call madvise(2) for whole pages of memory; whether the kernel accepts it."""
    return _madvise()(address, size, advice) == 0  # type: ignore[no-any-return]


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies, however it dies: no orphan keeps memory or a GPU.

    Call it in the child, before or after exec (the setting survives exec). The kernel watches the
    parent's *thread* that forked, so processes are started from main threads.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent died between fork and prctl.
        os.kill(os.getpid(), signal.SIGTERM)


OTHERS = 0o077
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def keep_files_private() -> None:
    """From now on no file or folder that this process or its children make is open to other users."""
    os.umask(OTHERS)


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file is its owner's alone, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def allow_many_descriptors() -> int:
    """Raise the soft limit of open files to the hard one, and return it. Shells start processes with 1,024.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
