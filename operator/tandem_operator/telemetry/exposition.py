"""Reads the `/metrics` of one pod. `NAMES` lists every series that the operator reads; a test compares it with the
metrics that gateways and workers export.

A pod's metrics are untrusted: the caller bounds their size, and readers check the values.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

WORKER = "tandem_worker_"
GATEWAY = "tandem_gateway_"
MODEL = "model_name"
"""The label of series of one model."""

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
SHARED_NAMES = frozenset({GATEWAY + "models"})
"""Of gateways that have several models."""

RELEASE_NAME = "tandem_release"
"""Absent in releases that have not named theirs in metrics."""

WORKER_LATENCY_NAMES = frozenset({WORKER + "step_base_seconds", WORKER + "step_fit_seconds"})
"""Absent until steps have been measured."""

GATEWAY_LATENCY_NAMES = frozenset(
    GATEWAY + name
    for name in (
        "arrival_gap_square_seconds_total",
        "processes",
        "generation_tokens_total",
        "uncached_prompt_tokens_bucket",
        "uncached_prompt_tokens_sum",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "inter_token_latency_seconds_sum",
        "slo_requests_total",
        "goodput_requests_total",
        "latency_factor",
        "latency_calibrated",
    )
)
"""Absent in gateways of earlier releases, and some until requests had objectives or were predicted."""

NAMES = (
    WORKER_NAMES
    | LINK_NAMES
    | GATEWAY_NAMES
    | SHARED_NAMES
    | {RELEASE_NAME}
    | WORKER_LATENCY_NAMES
    | GATEWAY_LATENCY_NAMES
)
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
            # Most of an exposition is buckets of histograms that are not read here; parsing them costs most.
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

    def sum_or_zero(self, name: str) -> float:
        """As `sum`, and 0 when there is no series. Raises `UnusableFiguresError`."""
        return self.sum(name) if self.samples.get(name) else 0.0

    def of_model(self, model: str) -> "Exposition":
        """The series of one model alone."""
        mine = {
            name: [sample for sample in samples if sample.labels.get(MODEL) == model]
            for name, samples in self.samples.items()
        }
        return Exposition({name: samples for name, samples in mine.items() if samples})

    def of(self, name: str) -> list[Sample]:
        """All series of `name`."""
        return self.samples.get(name, [])


def _is_read(line: str) -> bool:
    """Whether the line is a sample of `NAMES`."""
    match = _NAME.match(line)
    return match is not None and match[0] in NAMES
