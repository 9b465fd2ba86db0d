"""Pages as the address ranges that NIXL moves."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem_engine.names import PageId


class Region(NamedTuple):
    """Where a pool lies: page p starts at `address + p * page_bytes`."""

    address: int
    page_bytes: int
    num_pages: int
    device: str
    """DRAM or VRAM, NIXL's names."""
    device_id: int


class Descriptors(NamedTuple):
    """Matching ranges of both sides, as NIXL takes them: (address, bytes, device id)."""

    source: list[tuple[int, int, int]]
    target: list[tuple[int, int, int]]


def describe(here: Region, source: Sequence[PageId], there: Region, target: Sequence[PageId]) -> Descriptors:
    """One descriptor per run of pages that are neighbours on both sides; small pages gain most."""
    descriptors = Descriptors([], [])
    for first, count in _runs(source, target):
        size = count * here.page_bytes
        descriptors.source.append((here.address + source[first] * here.page_bytes, size, here.device_id))
        descriptors.target.append((there.address + target[first] * there.page_bytes, size, there.device_id))
    return descriptors


def _runs(source: Sequence[PageId], target: Sequence[PageId]) -> Iterator[tuple[int, int]]:
    """(index of its first page, pages) of each run."""
    first = 0
    for i in range(1, len(source) + 1):
        neighbours = i < len(source) and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1
        if not neighbours:
            yield first, i - first
            first = i
