"""Parts that the metrics of all services share: buckets, the exposition, and labels of bounded cardinality.

The code that builds a process creates its registry and passes it on; nothing registers itself globally.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem_engine.base.cgroups import cpu_quota, throttling
from tandem_engine.base.release import RELEASE
from tandem_services.common.metric_values import CounterFamily, HistogramFamily, LevelFamily

CONTENT_TYPE = CONTENT_TYPE_LATEST

REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets for durations of whole requests and of their phases."""

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
"""Buckets for the time between two tokens."""

TRANSFER_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets for moving the KV of one request: less than a millisecond where memory is shared, seconds over slow lines."""

PROMPT_TOKENS = tuple(float(round(2 ** (step / 2))) for step in range(10, 41))
"""Buckets for the tokens of prompts, 32 to 1,048,576: quantiles are right within a fifth."""

OTHER = "other"


def new_registry() -> CollectorRegistry:
    """A registry with the process's own memory, CPU, file descriptors, garbage collections and CPU quota, and its
    release."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(CpuQuotaCollector())
    add_release(registry)
    return registry


def add_release(registry: CollectorRegistry) -> None:
    """The series of this process's release."""
    text = "Number of this process's release; releases that meet in one fleet must be within a window"
    Gauge("tandem_release", text, registry=registry).set(RELEASE)


class CpuQuotaCollector(Collector):
    """The CPU quota of the control group of this process, read at each scrape, as it may change."""

    def collect(self) -> Iterator[Metric]:
        quota, counts = cpu_quota(), throttling()
        if quota is not None:
            yield GaugeMetricFamily("process_cpu_quota_cpus", "CPU seconds per second that the quota gives", quota)
        for name, text, value in (
            ("process_cpu_cfs_periods", "Periods of the CPU quota in which the control group computed", counts.periods),
            ("process_cpu_cfs_throttled_periods", "Periods in which the CPU quota was used up", counts.throttled),
            (
                "process_cpu_cfs_throttled_seconds",
                "Time for which the CPU quota stopped threads",
                counts.seconds,
            ),
        ):
            yield CounterMetricFamily(name, text, value)


Family = TypeVar("Family", bound=Collector)


@dataclass(frozen=True, slots=True)
class MetricFamilies:
    """Metric families of one registry, each created at its first use: several may have series of one family.

    Counters and histograms are written by one thread, that of the event loop which renders them.
    """

    registry: CollectorRegistry
    _made: dict[str, Collector] = field(default_factory=dict)

    def counter(self, name: str, text: str, labels: Sequence[str]) -> CounterFamily:
        """`name` without `_total`."""
        return self._family(name, lambda: CounterFamily(name, text, labels, self.registry))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return self._family(name, lambda: Gauge(name, text, labels, registry=self.registry))

    def level(self, name: str, text: str, labels: Sequence[str]) -> LevelFamily:
        """A gauge that changes with each request."""
        return self._family(name, lambda: LevelFamily(name, text, labels, self.registry))

    def histogram(self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float]) -> HistogramFamily:
        return self._family(name, lambda: HistogramFamily(name, text, labels, self.registry, buckets=buckets))

    def _family(self, name: str, make: Callable[[], Family]) -> Family:
        if name not in self._made:
            self._made[name] = make()
        return cast(Family, self._made[name])


async def render(registry: CollectorRegistry) -> bytes:
    """The exposition for `GET /metrics`, to be served as `CONTENT_TYPE`.

    Family by family, between which the event loop serves others: all of it takes milliseconds.
    """
    parts = []
    for family in registry.collect():
        parts.append(generate_latest(_Only(family)))
        await asyncio.sleep(0)
    return b"".join(parts)


class _Only(CollectorRegistry):
    """A registry of one family, as it was collected."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def bounded_label(value: str, known: Collection[str]) -> str:
    """`value` when known, else "other": what a client sends must not become a time series."""
    return value if value in known else OTHER
