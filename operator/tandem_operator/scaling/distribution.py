"""Counts of values by range, as histograms of metrics have them: mean, variance, quantiles and shares. Pure."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

MAX_RANGES = 128

PARTS = 4
"""Points that stand for the values of one range."""


@dataclass(frozen=True)
class Distribution:
    """Values above 0. Within a range they are taken as evenly spread.

    A decision reads these figures for every number of workers that it tries, so they are computed once.
    """

    bounds: tuple[float, ...]
    """Upper ends of the ranges, ascending; the last range ends at twice the bound before it where that is infinite."""
    counts: tuple[float, ...]
    """Values in each range."""
    sum: float
    """Of all values."""

    @staticmethod
    def of(bounds: Sequence[float], counts: Sequence[float], total: float) -> "Distribution":
        """`bounds`: the last may be infinite. Raises `ValueError` for ranges that no histogram has."""
        ends = [*bounds]
        if len(ends) != len(counts) or not 1 < len(ends) <= MAX_RANGES:
            raise ValueError(f"a histogram has 2 to {MAX_RANGES} buckets with a count each, got {len(ends)}")
        if ends[-1] == math.inf:
            ends[-1] = 2 * ends[-2]
        ascending = all(low < high for low, high in pairwise(ends))
        if not ascending or not math.isfinite(ends[-1]) or ends[0] < 0:
            raise ValueError("bounds of a histogram must be finite and ascend")
        if not all(math.isfinite(count) and count >= 0 for count in (*counts, total)):
            raise ValueError("counts of a histogram must be finite and not negative")
        return Distribution(tuple(ends), tuple(counts), total)

    @cached_property
    def count(self) -> float:
        """Values in all ranges."""
        return math.fsum(self.counts)

    @property
    def mean(self) -> float:
        """0 without values."""
        return self.sum / self.count if self.count else 0.0

    @cached_property
    def squared_variation(self) -> float:
        """Variance over the square of the mean; 0 without values."""
        if not self.count or not self.mean:
            return 0.0
        squares = math.fsum(count * (low * low + low * high + high * high) / 3 for low, high, count in self._ranges())
        middle = math.fsum(count * (low + high) / 2 for low, high, count in self._ranges()) / self.count
        return max(0.0, squares / self.count / (middle * middle) - 1.0)

    def quantile(self, share: float) -> float:
        """The value that `share` of them do not exceed; 0 without values."""
        wanted, passed = share * self.count, 0.0
        for low, high, count in self._ranges():
            if count and passed + count >= wanted:
                return low + (high - low) * (wanted - passed) / count
            passed += count
        return self.bounds[-1] if self.count else 0.0

    def share_up_to(self, value: float) -> float:
        """Share of the values that do not exceed `value`; 0 without values."""
        place = bisect_left(self.bounds, value)
        if not self.count:
            return 0.0
        if place == len(self.bounds):
            return 1.0
        low = self.bounds[place - 1] if place else 0.0
        part = (value - low) / (self.bounds[place] - low)
        return (math.fsum(self.counts[:place]) + max(0.0, part) * self.counts[place]) / self.count

    def points(self) -> tuple[tuple[float, float], ...]:
        """Values with their shares of all: `PARTS` for each range that has any."""
        return self._points

    @cached_property
    def _points(self) -> tuple[tuple[float, float], ...]:
        return tuple(
            (low + (high - low) * (part + 0.5) / PARTS, some / self.count / PARTS)
            for low, high, some in self._ranges()
            for part in range(PARTS if some else 0)
        )

    def since(self, before: "Distribution | None") -> "Distribution":
        """The increase; all of it if any count has become less or the ranges are others: the counter has restarted."""
        if before is None or before.bounds != self.bounds or before.sum > self.sum:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        if any(count < 0 for count in counts):
            return self
        return Distribution(self.bounds, counts, self.sum - before.sum)

    def plus(self, other: "Distribution") -> "Distribution":
        """Both together; `other` alone if its ranges are others."""
        if other.bounds != self.bounds:
            return other
        counts = tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.sum + other.sum)

    def times(self, factor: float) -> "Distribution":
        """Each value counts `factor` times as much."""
        return replace(self, counts=tuple(factor * count for count in self.counts), sum=factor * self.sum)

    def _ranges(self) -> Iterator[tuple[float, float, float]]:
        low = 0.0
        for high, count in zip(self.bounds, self.counts, strict=True):
            yield low, high, count
            low = high
