"""Unmaps pages of large libraries that a process has used at its start.

Resident is each page of a library that was touched once, with those around it that were in the page cache: 145 MiB of
a process that has imported torch and numba, of which steps use 15. LLVM alone has 65 MiB, and only compiles kernels.
What is unmapped stays in the page cache, where the kernel may drop it, and is mapped again by the next use.

`MADV_DONTNEED` loses what a page has and its file has not, and its address may be other memory once its library is
unloaded. Between the look at mappings and the call, no thread may write these pages or unload their library:

    being loaded    `dlopen` waits for a thread that loads it; relocations are written by then
    unloaded        `RTLD_NODELETE` keeps it for the life of the process, so only `LIBRARIES` are considered, which
                    Python never unloads, and not those that NIXL and UCX load and unload as they like
    changed         ranges with a page that was written, and may be swapped out, are left
"""

import ctypes
import logging
import mmap
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tandem_engine.base.cgroups import read_text
from tandem_engine.base.linux import advise

MAPS, SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
LIBRARIES = frozenset({"libllvmlite.so", "libtorch_cpu.so", "libtorch_python.so"})
CHANGED = ("Anonymous", "Private_Dirty", "Swap")
"""Sizes of what a range has and its file has not."""

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)")
_SIZE = re.compile(r"(\w+): +(\d+) kB")

logger = logging.getLogger(__name__)


def unmap_libraries() -> int:
    """Bytes that were resident. Only code and constants that are as in their file: nothing is lost with them."""
    if not MAPS.exists():
        return 0
    mapped = {header[4] for line in read_text(MAPS).splitlines() if (header := _HEADER.fullmatch(line))}
    loaded = {path for path in mapped if Path(path).name in LIBRARIES and _stays(path)}
    unmapped = 0
    for start, size, resident in clean_ranges(read_text(SMAPS), loaded):
        unmapped += resident if advise(start, size, mmap.MADV_DONTNEED) else 0
    logger.debug("unmapped %d MiB of libraries", unmapped >> 20)
    return unmapped


def _stays(path: str) -> bool:
    """Whether the library is loaded whole; if so, it is from now on as long as the process."""
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NODELETE)
    except OSError:
        return False
    return True


def clean_ranges(smaps: str, paths: Collection[str]) -> Iterator[tuple[int, int, int]]:
    """Address, size and resident bytes of mappings of `paths` that are not writable and have no page of their own.

    `smaps`: text of /proc/PID/smaps. A mapping that it does not describe whole counts as changed.
    """
    for header, sizes in _mappings(smaps, paths):
        start, end = int(header[1], 16), int(header[2], 16)
        if "w" in header[3]:
            continue
        if sizes.get("Rss") and all(sizes.get(name) == 0 for name in CHANGED):
            yield start, end - start, sizes["Rss"]


def _mappings(smaps: str, paths: Collection[str]) -> Iterator[tuple[re.Match[str], dict[str, int]]]:
    """Of these files: the first line of each mapping, and sizes in bytes by their names."""
    current: tuple[re.Match[str], dict[str, int]] | None = None
    for line in smaps.splitlines():
        # Of a thousand mappings of a process a few are of these files: only lines that may matter are taken apart.
        if line[:1].isupper():
            if current is not None and (size := _SIZE.fullmatch(line)):
                current[1][size[1]] = int(size[2]) << 10
            continue
        if current is not None:
            yield current
        header = _HEADER.fullmatch(line)
        current = None if header is None or header[4] not in paths else (header, {})
    if current is not None:
        yield current
