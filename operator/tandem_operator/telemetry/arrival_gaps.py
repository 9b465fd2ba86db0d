"""How bursty arrivals are: the squared coefficient of variation of the times between them.

Gateways publish sums of squares of these times, and the operator knows the seconds and the number of arrivals of each
look. A time of more than `MAX_GAP_S` is no burstiness of the load, but the end of one load and the begin of another,
which the rate of arrivals follows: one hour of night would count more than all arrivals of the next ten minutes, and
hold workers that nothing needs. It is left out, with the look in which it ends. Where such times are frequent, what
remains is too even: variation is then at least that of independent arrivals.

Each process of a gateway measures the times between its own arrivals, and the gateway's sum is that of all of them.
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

RARE = 0.01
"""Times that are left out, per arrival, without which the others say how even arrivals are."""

MAX_GATEWAYS = 512
"""More than a service has at the same time; beyond them, the one that has not answered for longest is forgotten."""


class Arrivals(NamedTuple):
    """Of one gateway between two looks at it."""

    gateway: str
    seconds: float
    number: float
    gap_square_s: float
    """Squares of the times that ended with them, the first of which may have begun before."""
    processes: int = 1
    """Of the gateway: each has measured its own."""


@dataclass(kw_only=True, slots=True)
class ArrivalGaps:
    """Of one service, whose gateways have equal shares of its arrivals."""

    _number: float = 0.0
    _seconds: float = 0.0
    """Of all processes of all gateways together."""
    _square_s: float = 0.0
    _left_out: float = 0.0
    """Looks that were left out, at least one time between arrivals each."""
    _processes: int = 1
    """Most of a gateway."""
    _waiting_s: dict[str, float] = field(default_factory=dict)
    """Since the look with the last arrival at a gateway. The next look at one that did not answer begins where the last
    one ended, so that its seconds are kept. The one that answered last is the last."""

    def take(self, arrivals: Collection[Arrivals]) -> None:
        """A look. One that a step of the clock has left without a duration says nothing."""
        looks = [one for one in arrivals if one.seconds >= MIN_LOOK_S]
        if not looks:
            return
        for one in looks:
            self._waiting_s[one.gateway] = self._waiting_s.pop(one.gateway, 0.0)
        while len(self._waiting_s) > max(MAX_GATEWAYS, len(looks)):
            del self._waiting_s[next(iter(self._waiting_s))]
        self._processes = max(one.processes for one in looks)
        if all(self._waiting_s[one.gateway] > MAX_GAP_S and not one.number for one in looks):
            self._wait(looks)
            return
        kept = 0.5 ** (max(one.seconds for one in looks) / HALF_LIFE_S)
        self._number, self._seconds, self._square_s, self._left_out = (
            kept * total for total in (self._number, self._seconds, self._square_s, self._left_out)
        )
        for one in looks:
            if one.number:
                self._add(one, self._waiting_s[one.gateway])
        self._wait(looks)

    @property
    def variation(self) -> float:
        """From 0 to `MAX_VARIATION`; 1, as of arrivals that are independent of each other, where it is not known (any
        more).

        Not less than 1 while gateways have several processes: the kernel gives each its connections, so their shares
        may differ.
        """
        if self._number < 1.0 or not self._square_s:
            return 1.0
        least = 1.0 if self._left_out > RARE * self._number or self._processes > 1 else 0.0
        return min(max(least, self._square_s * self._number / self._seconds**2 - 1.0), MAX_VARIATION)

    def _add(self, one: Arrivals, waited_s: float) -> None:
        seconds = waited_s + one.seconds
        # Squares of times that are no longer than `MAX_GAP_S` and together take these seconds, in each process.
        most_square_s = one.processes * MAX_GAP_S * max(MAX_GAP_S, seconds)
        if waited_s > MAX_GAP_S or one.gap_square_s > most_square_s:
            self._left_out += 1.0
            return
        self._number += one.number
        self._seconds += one.processes * seconds
        self._square_s += one.gap_square_s

    def _wait(self, looks: Collection[Arrivals]) -> None:
        for one in looks:
            waited_s = 0.0 if one.number else min(self._waiting_s[one.gateway], MAX_GAP_S) + one.seconds
            self._waiting_s[one.gateway] = waited_s
