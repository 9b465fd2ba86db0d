"""How bursty arrivals are: the squared coefficient of variation of the times between them.

Gateways publish sums of squares of these times, and the operator knows the seconds and the number of arrivals of each
look. A time of more than `MAX_GAP_S` is no burstiness of the load, but the end of one load and the begin of another,
which the rate of arrivals follows: one hour of night would count more than all arrivals of the next ten minutes, and
hold workers that nothing needs. It is left out, with the look in which it ends.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

HALF_LIFE_S = 300.0
"""Of seconds in which requests come now and then."""

MAX_GAP_S = 60.0
"""The rate of arrivals has forgotten three quarters of what came before such a time."""

MIN_LOOK_S = 0.001
"""Shorter looks are steps of a clock."""

MAX_VARIATION = 1_000.0


class Arrivals(NamedTuple):
    """Of one gateway between two looks."""

    gateway: str
    seconds: float
    number: float
    gap_square_s: float
    """Squares of the times that ended with them, the first of which may have begun before."""


@dataclass(kw_only=True, slots=True)
class ArrivalGaps:
    """Of one service, whose gateways have equal shares of its arrivals."""

    _number: float = 0.0
    _seconds: float = 0.0
    """Of all gateways together."""
    _square_s: float = 0.0
    _waiting_s: dict[str, float] = field(default_factory=dict)
    """Since the look with the last arrival at a gateway."""

    def take(self, arrivals: Collection[Arrivals]) -> None:
        """A look. One that a step of the clock has left without a duration says nothing."""
        looks = [one for one in arrivals if one.seconds >= MIN_LOOK_S]
        if not looks:
            return
        self._waiting_s = {one.gateway: self._waiting_s.get(one.gateway, 0.0) for one in looks}
        if all(self._waiting_s[one.gateway] > MAX_GAP_S and not one.number for one in looks):
            self._wait(looks)
            return
        kept = 0.5 ** (max(one.seconds for one in looks) / HALF_LIFE_S)
        self._number, self._seconds, self._square_s = (
            kept * total for total in (self._number, self._seconds, self._square_s)
        )
        for one in looks:
            waited_s = self._waiting_s[one.gateway]
            if one.number and waited_s <= MAX_GAP_S and one.gap_square_s <= MAX_GAP_S**2:
                self._number += one.number
                self._seconds += waited_s + one.seconds
                self._square_s += one.gap_square_s
        self._wait(looks)

    @property
    def variation(self) -> float:
        """From 0 to `MAX_VARIATION`; 1, as of arrivals that are independent of each other, where it is not known (any
        more)."""
        if self._number < 1.0 or not self._square_s:
            return 1.0
        return min(max(0.0, self._square_s * self._number / self._seconds**2 - 1.0), MAX_VARIATION)

    def _wait(self, looks: Collection[Arrivals]) -> None:
        for one in looks:
            waited_s = 0.0 if one.number else min(self._waiting_s[one.gateway], MAX_GAP_S) + one.seconds
            self._waiting_s[one.gateway] = waited_s
