"""Consistent hashing: which workers prompts with a given first block go to by default.

Each worker has `POINTS` points on a ring, given by its name alone, so that all gateways agree. A key belongs to the
worker of the next point. A worker that joins or leaves moves only prompts from or to itself, and a decision costs the
same in any fleet.
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

POINTS = 16
"""Of each worker. The shares of workers differ by a quarter from their mean."""

POINT_BYTES = 8
DIGEST_BYTES = 64
"""Longest of a BLAKE2b: eight points."""


@dataclass(slots=True)
class HashRing:
    """Of names. Changes cost a pass over all points; a walk, one search."""

    _points: "array[int]" = field(default_factory=lambda: array("Q"))
    """Ascending."""
    _owners: list[str] = field(default_factory=list)
    """Of the points, in their order."""

    def change(self, *, joined: Collection[str], left: Collection[str]) -> None:
        """`joined` are not on the ring yet."""
        gone = set(left)
        kept = [pair for pair in zip(self._points, self._owners, strict=True) if pair[1] not in gone]
        kept += [(point, name) for name in joined for point in _points_of(name)]
        kept.sort()
        self._points = array("Q", [point for point, _ in kept])
        self._owners = [name for _, name in kept]

    def walk(self, key: bytes) -> Iterator[str]:
        """The names of the points from that of `key` on, once around the ring, each as often as it has points."""
        owners, first = self._owners, bisect_left(self._points, _point_of(key))
        for index in range(first, first + len(owners)):
            yield owners[index % len(owners)]


def _points_of(name: str) -> Iterator[int]:
    for part in range(POINTS * POINT_BYTES // DIGEST_BYTES):
        digest = blake2b(name.encode(), digest_size=DIGEST_BYTES, salt=bytes([part])).digest()
        for first in range(0, DIGEST_BYTES, POINT_BYTES):
            yield int.from_bytes(digest[first : first + POINT_BYTES], "big")


def _point_of(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=POINT_BYTES).digest(), "big")
