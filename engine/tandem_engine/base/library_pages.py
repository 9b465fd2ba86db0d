"""Unmaps pages of shared libraries that a process has used at its start.

Resident is each page of a library that was touched once, with those around it that were in the page cache: 145 MiB of
a process that has imported torch and numba, of which steps use 15. LLVM alone has 65 MiB, and only compiles kernels.
What is unmapped stays in the page cache, where the kernel may drop it, and is mapped again by the next use.
"""

import logging
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from tandem_engine.base.cgroups import read_text
from tandem_engine.base.linux import advise

SMAPS = Path("/proc/self/smaps")
LIBRARY = re.compile(r"\.so[.\d]*$")

logger = logging.getLogger(__name__)


def unmap_libraries() -> int:
    """Bytes that were resident. Only code and constants that are as in their file: nothing is lost with them.

    Call it while no thread loads a library, whose pages are in the making.
    """
    unmapped = 0
    for start, size, resident in clean_ranges(read_text(SMAPS)):
        unmapped += resident if advise(start, size, mmap.MADV_DONTNEED) else 0
    logger.debug("unmapped %d MiB of libraries", unmapped >> 20)
    return unmapped


def clean_ranges(smaps: str) -> Iterator[tuple[int, int, int]]:
    """Address, size and resident bytes of mappings of libraries that are not writable and have no page of their own.

    `smaps`: text of /proc/PID/smaps.
    """
    lines = iter(smaps.splitlines())
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or LIBRARY.search(fields[5]) is None or "w" in fields[1]:
            continue
        counts: dict[str, int] = {}
        for entry in lines:
            name, _, value = entry.partition(":")
            if name == "VmFlags":
                break
            counts[name] = int(value.split()[0]) << 10 if value.endswith("kB") else 0
        start, end = (int(address, 16) for address in fields[0].split("-"))
        if counts["Rss"] and not counts["Anonymous"] and not counts["Private_Dirty"]:
            yield start, end - start, counts["Rss"]
