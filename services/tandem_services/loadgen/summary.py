"""Percentiles, throughput and goodput of a run."""

import math
from collections.abc import Sequence

import msgspec

from tandem_services.loadgen.stream_client import Measurement
from tandem_services.loadgen.workload import Prompt


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good when it meets every bound that is set (milliseconds)."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Bound on a request's mean inter-token latency."""
    e2e_ms: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    requests: int
    failed: int
    mismatched: int
    """Streams whose text differs from the reference for the same prompt."""
    checked: int
    """Streams compared with a reference."""
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    goodput_requests_per_s: float | None
    """None when no SLO was given."""
    errors: dict[str, int]
    """Message → how often."""


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Nearest-rank percentiles; None without samples."""
    if not seconds:
        return None
    ranked = sorted(value * 1e3 for value in seconds)

    def rank(share: float) -> float:
        return ranked[math.ceil(share * len(ranked)) - 1]

    return Percentiles(mean=sum(ranked) / len(ranked), p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), max=ranked[-1])


def is_good(m: Measurement, slo: Slo) -> bool:
    """Whether a request succeeded within every bound."""
    if not m.ok or m.first is None or m.ended is None:
        return False
    itl = sum(m.gaps) / len(m.gaps) if m.gaps else 0.0
    bounds = ((slo.ttft_ms, m.first - m.began), (slo.itl_ms, itl), (slo.e2e_ms, m.ended - m.began))
    return all(limit is None or value * 1e3 <= limit for limit, value in bounds)


def summarise(
    measurements: Sequence[Measurement], seconds: float, *, slo: Slo | None, references: dict[Prompt, str]
) -> Summary:
    """`references` maps a prompt to the text that greedy decoding must give for it."""
    good = [m for m in measurements if m.ok]
    compared = [m for m in good if m.spec.prompt in references]
    errors: dict[str, int] = {}
    for m in measurements:
        if m.error is not None:
            errors[m.error] = errors.get(m.error, 0) + 1
    output_tokens = sum(m.output_tokens for m in good)
    return Summary(
        requests=len(measurements),
        failed=len(measurements) - len(good),
        mismatched=sum(m.text != references[m.spec.prompt] for m in compared),
        checked=len(compared),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        prompt_tokens=sum(m.prompt_tokens for m in good),
        cached_tokens=sum(m.cached_tokens for m in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        ttft_ms=percentiles([m.first - m.began for m in good if m.first is not None]),
        itl_ms=percentiles([gap for m in good for gap in m.gaps]),
        e2e_ms=percentiles([m.ended - m.began for m in good if m.ended is not None]),
        goodput_requests_per_s=None if slo is None else sum(is_good(m, slo) for m in measurements) / seconds,
        errors=errors,
    )
