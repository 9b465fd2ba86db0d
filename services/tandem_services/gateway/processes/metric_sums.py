"""One exposition of several processes of a gateway, as if they were one.

counters, histograms    summed, with what ended processes had counted at their last scrape: no counter falls
gauges                  summed; those that each process has of the same thing: the greatest

Prometheus's own files for several processes are not used: they cost each increment, and remain of processes that died.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

OF_ALL = frozenset(
    (
        *("tandem_release", "python_info", "process_max_fds", "process_start_time_seconds"),
        *("process_cpu_quota_cpus", "process_cpu_cfs_periods", "process_cpu_cfs_throttled_periods"),
        *("process_cpu_cfs_throttled_seconds", "tandem_gateway_oldest_wait_seconds", "tandem_gateway_latency_factor"),
        *("tandem_gateway_latency_calibrated", "tandem_gateway_models", "tandem_gateway_models_file_stale"),
        *("tandem_gateway_models_unserved", "tandem_gateway_api_key_tenants", "tandem_gateway_api_keys_stale"),
        "tandem_gateway_quarantined_requests",
    )
)
"""Families that say the same of every process: the greatest value counts."""

ACCUMULATED = frozenset(("counter", "histogram", "summary"))

Labels = tuple[tuple[str, str], ...]
Values = dict[tuple[str, Labels], float]
"""Of a family, by the name and the labels of a sample."""


@dataclass(slots=True)
class _Sum:
    """One family."""

    text: str
    kind: str
    values: Values = field(default_factory=dict)

    def add(self, name: str, family: Metric) -> None:
        greatest = name in OF_ALL or name.endswith("_created")
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            before = self.values.get(key)
            if before is None:
                self.values[key] = sample.value
            else:
                self.values[key] = max(before, sample.value) if greatest else before + sample.value


@dataclass(slots=True)
class MetricSums:
    """One per gateway."""

    _ended: list[list[Metric]] = field(default_factory=list)
    """What ended processes had counted, as one."""
    _last: dict[int, list[Metric]] = field(default_factory=dict)
    """Of each process, at its last scrape."""
    _lives: Counter[int] = field(default_factory=Counter)

    def life_of(self, number: int) -> int:
        """How many processes of this number have ended: which one a scrape begins at."""
        return self._lives[number]

    def scraped(self, number: int, exposition: bytes, *, life: int) -> None:
        """Of a process that has ended since, nothing. Raises `ValueError` for what is no exposition."""
        if life != self._lives[number]:
            return
        self._last[number] = [*text_string_to_metric_families(exposition.decode("utf-8"))]

    def ended(self, number: int) -> None:
        """The process of this number has ended: its gauges go, its counts stay."""
        self._lives[number] += 1
        last = self._last.pop(number, None)
        if last is None:
            return
        counted = [family for family in last if family.type in ACCUMULATED and family.name not in OF_ALL]
        self._ended = [[*_families((*self._ended, counted))]]

    def exposition(self) -> bytes:
        """Of those scraped last and those that have ended."""
        registry = _Collected([*_families((*self._last.values(), *self._ended))])
        return generate_latest(registry)


def _families(of_processes: Iterable[list[Metric]]) -> Iterator[Metric]:
    sums: dict[str, _Sum] = {}
    for families in of_processes:
        for family in families:
            sums.setdefault(family.name, _Sum(family.documentation, family.type)).add(family.name, family)
    for name, total in sums.items():
        family = Metric(name, total.text, total.kind)
        for (sample, labels), value in total.values.items():
            family.add_sample(sample, dict(labels), value)
        yield family


class _Collected(CollectorRegistry):
    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
