"""Pages as the address ranges that NIXL moves."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem_engine.names import PageId

Ranges: TypeAlias = npt.NDArray[np.uint64]
"""[N, 3]: address, bytes, device id. NIXL reads such an array far faster than a list of tuples."""


class Region(NamedTuple):
    """Where a pool lies: page p starts at `address + p * page_bytes`."""

    address: int
    page_bytes: int
    num_pages: int
    device: str
    """DRAM or VRAM, NIXL's names."""
    device_id: int


class Descriptors(NamedTuple):
    """Matching ranges of both sides."""

    source: Ranges
    target: Ranges


def describe(here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId]) -> Descriptors:
    """One range per run of pages that are neighbours on both sides; small pages gain most."""
    sources, targets = np.array(source, np.uint64), np.array(target, np.uint64)
    breaks = np.flatnonzero((sources[1:] != sources[:-1] + 1) | (targets[1:] != targets[:-1] + 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(starts, append=len(sources))
    return Descriptors(_ranges(here, sources[starts], counts), _ranges(there, targets[starts], counts))


def _ranges(region: Region, pages: npt.NDArray[np.uint64], counts: npt.NDArray[np.intp]) -> Ranges:
    ranges = np.empty((len(pages), 3), np.uint64)
    ranges[:, 0] = region.address + pages * region.page_bytes
    ranges[:, 1] = counts * region.page_bytes
    ranges[:, 2] = region.device_id
    return ranges
