"""The workers of a view by model, role and compat hash, for decisions that may not look at all of them.

Renewed by differences with each view, at a cost that grows with the fleet: once a second, and not in a decision.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from tandem_engine.config import Role
from tandem_services.router.registry import WorkerRecord

# Consistent hashing: which workers prompts with a given first block go to by default.
#
# Each worker has `POINTS` points on a ring, given by its name alone, so that all gateways agree. A key belongs to the
# worker of the next point. A worker that joins or leaves moves only prompts from or to itself, and a decision costs the
# same in any fleet.

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


class _Place(NamedTuple):
    model: str
    role: Role
    compat_hash: str


@dataclass(slots=True)
class _Model:
    page_size: int
    rings: dict[Role, HashRing] = field(default_factory=dict)
    groups: dict[tuple[Role, str], list[str]] = field(default_factory=dict)
    """Incarnations by role and compat hash."""
    size: int = 0


@dataclass(slots=True)
class FleetGroups:
    """Of one view."""

    _models: dict[str, _Model] = field(default_factory=dict)
    _records: Mapping[str, WorkerRecord] = field(default_factory=dict)
    _places: dict[str, _Place] = field(default_factory=dict)
    """By incarnation."""

    def update(self, records: Mapping[str, WorkerRecord]) -> None:
        """The view contains `records` now, by incarnation. They are not changed afterwards."""
        known, self._records = self._records, records
        changed = any(known.get(name) is not record for name, record in records.items())
        if not changed and len(known) == len(records):
            return
        places = {name: _place_of(record) for name, record in records.items()}
        sizes = Counter((record.view.model, record.view.page_size) for record in records.values())
        if places != self._places:
            self._change(places)
        for (model, page_size), _ in reversed(sizes.most_common()):
            self._models[model].page_size = page_size

    def size(self, model: str) -> int:
        """Workers of `model`, whatever their state."""
        return self._models[model].size if model in self._models else 0

    def page_size(self, model: str) -> int | None:
        """Page size of most workers of the model: the others' caches cannot be matched with the same chain."""
        return self._models[model].page_size if model in self._models else None

    def rings(self, model: str) -> Mapping[Role, HashRing]:
        """One for each role that the model has workers of."""
        return self._models[model].rings if model in self._models else {}

    def groups(self, model: str) -> Mapping[tuple[Role, str], Sequence[str]]:
        """Incarnations by role and compat hash."""
        return self._models[model].groups if model in self._models else {}

    def others(self, compat_hash: str) -> frozenset[str]:
        """Incarnations of another compat hash, of all models. Costs nothing where there are none."""
        found = [
            name
            for model in self._models.values()
            for (_, compat), names in model.groups.items()
            if compat != compat_hash
            for name in names
        ]
        return frozenset(found)

    def _change(self, places: Mapping[str, _Place]) -> None:
        left = {name: place for name, place in self._places.items() if places.get(name) != place}
        joined = {name: place for name, place in places.items() if self._places.get(name) != place}
        self._places = dict(places)
        self._models = {
            model: self._models.get(model, _Model(page_size=0)) for model in {place.model for place in places.values()}
        }
        for changed, role in {(place.model, place.role) for place in (*left.values(), *joined.values())}:
            if (model := self._models.get(changed)) is not None:
                ring = model.rings.setdefault(role, HashRing())
                ring.change(joined=_of_role(joined, changed, role), left=_of_role(left, changed, role))
        for model in self._models.values():
            model.groups, model.size = {}, 0
        for name, place in places.items():
            model = self._models[place.model]
            model.groups.setdefault((place.role, place.compat_hash), []).append(name)
            model.size += 1
        for model in self._models.values():
            roles = {role for role, _ in model.groups}
            model.rings = {role: ring for role, ring in model.rings.items() if role in roles}


def _place_of(record: WorkerRecord) -> _Place:
    return _Place(record.view.model, record.view.role, record.view.compat_hash)


def _of_role(places: Mapping[str, _Place], model: str, role: Role) -> list[str]:
    return [name for name, place in places.items() if (place.model, place.role) == (model, role)]
