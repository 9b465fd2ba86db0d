"""Counters, histograms and gauges as plain numbers, written by one thread and read at each scrape.

A series of prometheus_client takes a lock for each increment and looks for its bucket one by one, which is a seventh of
what a gateway computes for a request. These have no lock: the event loop writes them, and `render` reads them there.
Names, buckets and bytes of the exposition are the same.

    family    of one name; makes a series at the first use of its label values, and collects all
    series    the numbers of one set of label values; keep it where it is used often
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

Point = tuple[str, dict[str, str], float]
"""One sample: suffix of its name, further labels, value."""

_PROBE = Counter("probe", "Never exposed", registry=None)

_TELLS_CREATED = any(sample.name == "probe_created" for family in _PROBE.collect() for sample in family.samples)
"""prometheus_client adds the time of creation, unless its environment variable forbids that."""


class Series(Protocol):
    """The numbers of one set of label values."""

    def points(self) -> Iterator[Point]: ...


class CounterSeries:
    """One number that only grows."""

    __slots__ = ("_created", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._created = time.time()

    def inc(self, amount: float = 1.0) -> None:
        """Raises `ValueError` for a negative amount."""
        if amount < 0:
            raise ValueError(f"a counter cannot decrease, got {amount}")
        self.value += amount

    def points(self) -> Iterator[Point]:
        yield "_total", {}, self.value
        if _TELLS_CREATED:
            yield "_created", {}, self._created


class LevelSeries:
    """One number that is changed where it is: a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def points(self) -> Iterator[Point]:
        yield "", {}, self.value


class HistogramSeries:
    """Observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_created", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: inclusive upper ones, in order; the last is infinite."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, amount: float) -> None:
        """`amount` is a number: NaN has no bucket."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def points(self) -> Iterator[Point]:
        count = 0
        for bound, more in zip(self._bounds, self._counts, strict=True):
            count += more
            yield "_bucket", {"le": floatToGoString(bound)}, float(count)  # type: ignore[no-untyped-call]
        yield "_count", {}, float(count)
        yield "_sum", {}, self._sum
        if _TELLS_CREATED:
            yield "_created", {}, self._created


S = TypeVar("S", bound=Series)


class _Family(Collector, Generic[S]):
    """All series of one name."""

    _kind: str

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], S] = {}
        registry.register(self)

    def series(self, *values: str) -> S:
        """The series of these label values, in the order of the label names."""
        found = self._series.get(values)
        return self._add(values) if found is None else found

    def describe(self) -> Iterable[Metric]:
        return [Metric(self._name, self._text, self._kind)]

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self._name, self._text, self._kind)
        for values, series in self._series.items():
            named = dict(zip(self._labels, values, strict=True))
            for suffix, further, value in series.points():
                metric.add_sample(self._name + suffix, named | further, value)
        return [metric]

    def _add(self, values: tuple[str, ...]) -> S:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, got {values}")
        made = self._series[values] = self._new()
        return made

    def _new(self) -> S:
        raise NotImplementedError


class CounterFamily(_Family[CounterSeries]):
    """`name` without `_total`."""

    _kind = "counter"

    def _new(self) -> CounterSeries:
        return CounterSeries()


class LevelFamily(_Family[LevelSeries]):
    _kind = "gauge"

    def _new(self) -> LevelSeries:
        return LevelSeries()


class HistogramFamily(_Family[HistogramSeries]):
    _kind = "histogram"

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, *, buckets: Sequence[float]
    ) -> None:
        self._bounds = (*buckets, INF)
        super().__init__(name, text, labels, registry)

    def _new(self) -> HistogramSeries:
        return HistogramSeries(self._bounds)
