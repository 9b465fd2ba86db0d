"""What a pod's `/metrics` says, by name. Other pods' words: bounded by who fetched them, and checked here.

`NAMES` is every series that the operator reads; a test compares it with what gateways and workers export.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

WORKER = "tandem_worker_"
GATEWAY = "tandem_gateway_"

WORKER_NAMES = frozenset(
    WORKER + name
    for name in (
        "role",
        "offered",
        "draining",
        "stats_age_seconds",
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_transferring",
        "num_requests_inflight",
        "num_requests_leaving",
        "num_requests_swapped",
        "waiting_prompt_tokens",
        "oldest_wait_seconds",
        "max_running_requests",
        "prefill_tokens_per_second",
        "kv_pages",
        "kv_pages_free",
        "kv_pages_evictable",
    )
)
LINK_NAMES = frozenset({"tandem_link_conditions", "tandem_link_bytes_per_second"})
"""Absent while a worker has no peers."""
GATEWAY_NAMES = frozenset(
    GATEWAY + name
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_held",
        "waiting_prompt_tokens",
        "oldest_wait_seconds",
        "choices_total",
        "asked_prompt_tokens_total",
        "predicted_cached_tokens_total",
        "time_to_first_token_seconds_sum",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_sum",
        "e2e_request_latency_seconds_count",
    )
)
NAMES = WORKER_NAMES | LINK_NAMES | GATEWAY_NAMES

_NAME = re.compile(r"tandem_\w+")


class UnusableFiguresError(Exception):
    """A pod answered with something that cannot be read, or that lacks a figure. The sentence names it."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples of `NAMES` by series."""

    samples: Mapping[str, list[Sample]]

    @staticmethod
    def parse(text: str) -> "Exposition":
        """Raises `UnusableFiguresError`."""
        samples: dict[str, list[Sample]] = {}
        try:
            # Most of an exposition is buckets of histograms that nobody reads here; parsing them costs most.
            for metric in text_string_to_metric_families("\n".join(filter(_is_read, text.splitlines()))):
                for sample in metric.samples:
                    samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise UnusableFiguresError(f"its metrics cannot be read: {error}") from error
        return Exposition(samples)

    def sum(self, name: str) -> float:
        """Over all series of `name`. Raises `UnusableFiguresError` when there is none, or one is no number."""
        found = self.samples.get(name)
        if not found:
            raise UnusableFiguresError(f"it has no metric {name}")
        total = math.fsum(sample.value for sample in found)
        if not math.isfinite(total) or total < 0:
            raise UnusableFiguresError(f"its metric {name} is {total}")
        return total

    def of(self, name: str) -> list[Sample]:
        """All series of `name`."""
        return self.samples.get(name, [])


def _is_read(line: str) -> bool:
    """Whether the line is a sample of `NAMES`."""
    match = _NAME.match(line)
    return match is not None and match[0] in NAMES
