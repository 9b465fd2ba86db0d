"""Memory in pages of 2 MiB.

Weights are read from end to end for every token. In pages of 4 KiB the processor has to find out where the next one is
a quarter of a million times a gigabyte, on a virtual machine twice each time, and begins anew to read ahead.

Linux moves memory that is written already to huge pages when asked to (`MADV_COLLAPSE`, since 6.1), unless they are
switched off on the machine. Where it does not, it is asked to do so in the background, as far as it likes to. It may
stop at the first page that it cannot move and does not tell how far it came, so it is asked piece by piece.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

HUGE = 2 << 20
"""Bytes of a huge page of x86 and of most ARM machines."""
MOST_BETWEEN = 1 << 16
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
        advance: told the bytes of every piece once it was tried; together those of `movable`.

    Returns the bytes of pieces that were moved whole; what they hold stays. Whoever owns them must keep them meanwhile.
    """
    moved = 0
    for address, size in _pieces(movable(ranges)):
        _advise(address, size, _MADV_HUGEPAGE)
        moved += size if _advise(address, size, _MADV_COLLAPSE) else 0
        advance(size)
    if moved:
        logger.info("%d MiB of weights are in huge pages", moved >> 20)
    return moved


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """The huge pages within `ranges`. Those that nearly touch count as one: their neighbours are of the same heap."""
    joined: list[tuple[int, int]] = []
    for start, size in sorted(set(ranges)):
        if joined and start - joined[-1][1] <= MOST_BETWEEN:
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


def _advise(address: int, size: int, advice: int) -> bool:
    return _madvise()(address, size, advice) == 0  # type: ignore[no-any-return]


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
