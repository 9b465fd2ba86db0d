"""Lists of CPUs as Linux writes them: `0-3,8`. And keeping a thread on some of them.

A thread that may run anywhere is moved between cores while it computes, now and then onto one where another worker's
thread computes: both then take twice as long for some milliseconds. Threads that a bound thread starts, such as those
of its OpenMP team, stay on the same cores.
"""

import os
from collections.abc import Collection


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
