"""The order of those that wait at a gateway, and who gives way when there are too many. Pure.

Order: greater priority first; then the tenant that has had least (`VirtualCounters`); then who came first. Priority is
bounded by what a tenant may ask for, so only operators put one tenant before another.

Full: a newcomer takes the seat of the tenant that holds most of them, over its weight; of that tenant, who would be
served last gives way. A tenant that floods the queue therefore pushes out its own, and nobody else's.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem_services.router.virtual_counters import VirtualCounters


@dataclass(kw_only=True, slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    tenant: str
    weight: float
    priority: int
    arrived: float
    number: int = 0
    """Given by the queue, in order of arrival."""
    not_before: float = float("-inf")
    """Nobody could take it when it was tried last: others are tried until then."""


def _order(waiting: Waiting) -> tuple[int, int]:
    return (-waiting.priority, waiting.number)


W = TypeVar("W", bound=Waiting)


@dataclass(kw_only=True, slots=True)
class FairQueue(Generic[W]):
    """One per model service; belongs to its event loop."""

    seats: int
    counters: VirtualCounters
    _by_tenant: dict[str, list[W]] = field(default_factory=dict)
    _size: int = 0
    _arrivals: int = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[W]:
        return (waiting for line in self._by_tenant.values() for waiting in line)

    @property
    def lengths(self) -> dict[str, int]:
        """How many wait, by tenant."""
        return {tenant: len(line) for tenant, line in self._by_tenant.items()}

    def add(self, newcomer: W) -> W | None:
        """Take a seat. Returns who has none then: the newcomer, or another that it has pushed out."""
        loser = self._loser(newcomer) if self._size >= self.seats else None
        if loser is newcomer:
            return newcomer
        if loser is not None:
            self.remove(loser)
        self.counters.arrive(newcomer.tenant)
        self._arrivals += 1
        newcomer.number = self._arrivals
        insort(self._by_tenant.setdefault(newcomer.tenant, []), newcomer, key=_order)
        self._size += 1
        return loser

    def next(self, now: float) -> W | None:
        """Who is to be tried; stays in the queue. None when nobody is to be tried now."""
        heads = (self._head(line, now) for line in self._by_tenant.values())
        return min((head for head in heads if head is not None), key=self._rank, default=None)

    def remove(self, waiting: W) -> bool:
        """It is served, or waits no more. False when it was not there."""
        line = self._by_tenant.get(waiting.tenant, [])
        if waiting not in line:
            return False
        line.remove(waiting)
        self._size -= 1
        if not line:
            del self._by_tenant[waiting.tenant]
            self.counters.leave(waiting.tenant)
        return True

    def _head(self, line: list[W], now: float) -> W | None:
        return next((waiting for waiting in line if waiting.not_before <= now), None)

    def _rank(self, waiting: W) -> tuple[int, float, int]:
        return (-waiting.priority, self.counters.value(waiting.tenant), waiting.number)

    def _loser(self, newcomer: W) -> W:
        own = self._by_tenant.get(newcomer.tenant, [])
        held = (len(own) + 1) / newcomer.weight
        largest = max(self._by_tenant.values(), key=_share, default=[])
        if largest and largest is not own and _share(largest) > held:
            return largest[-1]
        # Its own tenant holds most. A more important newcomer takes the seat of a less important one.
        return own[-1] if own and own[-1].priority < newcomer.priority else newcomer


def _share(line: Sequence[Waiting]) -> float:
    return len(line) / line[0].weight
