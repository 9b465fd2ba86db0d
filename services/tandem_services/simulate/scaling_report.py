"""Scalers side by side: what they attained and what they took for it."""

from collections.abc import Mapping, Sequence

import msgspec

from tandem_services.loadgen.summary import Percentiles, Slo, percentiles
from tandem_services.simulate.bar_plot import Panel, draw
from tandem_services.simulate.replay import Outcome
from tandem_services.simulate.report import is_good


class ScalerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler's figures. Times are milliseconds."""

    requests: int
    refused: int
    refusals: dict[str, int]
    """Those that were refused, by reason."""
    gateway_wait_ms: Percentiles | None
    """In the gateway's queue, of those that got a worker."""
    slo_attainment: float
    """Share of all requests within every bound."""
    worker_hours: float
    """From when a worker was asked for until it had gone."""
    good_per_worker_hour: float
    """Requests within every bound for an hour of one worker."""
    workers_most: int
    scalings: int
    """Periods in which the number of workers changed."""
    ttft_ms: Percentiles | None
    e2e_ms: Percentiles | None


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--autoscale --json` prints."""

    requests: int
    simulated_s: float
    scalers: dict[str, ScalerReport]
    requests_per_minute: float
    """Replayed by this machine, all scalers together."""


def scaler_report(outcome: Outcome, slo: Slo) -> ScalerReport:
    """Figures of one run."""
    good = sum(is_good(served, slo) for served in outcome.served)
    hours = outcome.worker_seconds / 3600
    total = len(outcome.served) + len(outcome.refused)
    return ScalerReport(
        requests=total,
        refused=len(outcome.refused),
        refusals=dict(sorted(outcome.refusals.items())),
        gateway_wait_ms=percentiles(outcome.gateway_waits),
        slo_attainment=good / total if total else 0.0,
        worker_hours=hours,
        good_per_worker_hour=good / hours if hours else 0.0,
        workers_most=outcome.workers_most,
        scalings=outcome.scalings,
        ttft_ms=percentiles([served.ttft_s for served in outcome.served]),
        e2e_ms=percentiles([served.e2e_s for served in outcome.served]),
    )


def scaling_table(report: ScalingReport) -> str:
    """Aligned lines, a column for each scaler."""
    names = list(report.scalers)
    wide = max(14, *(len(name) + 2 for name in names))
    lines = [
        f"{report.requests} requests in {report.simulated_s / 60:.0f} minutes",
        "",
        " " * 26 + "".join(f"{name:>{wide}}" for name in names),
    ]
    for title, values in _rows(report.scalers, names):
        lines.append(f"{title:<26}" + "".join(f"{value:>{wide}.4g}" for value in values))
    return "\n".join([*lines, "", f"replayed {report.requests_per_minute:.0f} requests per minute"])


def scaling_plot(report: ScalingReport, title: str) -> str:
    """The same as SVG."""
    names = list(report.scalers)
    panels = [
        Panel(title=row, values=dict(zip(names, values, strict=True))) for row, values in _rows(report.scalers, names)
    ]
    return draw(title, panels)


def _rows(scalers: Mapping[str, ScalerReport], names: Sequence[str]) -> list[tuple[str, list[float]]]:
    of = [scalers[name] for name in names]
    return [
        ("SLO attainment", [each.slo_attainment for each in of]),
        ("worker hours", [each.worker_hours for each in of]),
        ("good per worker hour", [each.good_per_worker_hour for each in of]),
        ("most workers", [float(each.workers_most) for each in of]),
        ("periods with a change", [float(each.scalings) for each in of]),
        ("TTFT p50 ms", [_rank(each.ttft_ms, "p50") for each in of]),
        ("TTFT p99 ms", [_rank(each.ttft_ms, "p99") for each in of]),
        ("gateway wait p50 ms", [_rank(each.gateway_wait_ms, "p50") for each in of]),
        ("gateway wait p99 ms", [_rank(each.gateway_wait_ms, "p99") for each in of]),
        ("E2E mean ms", [_rank(each.e2e_ms, "mean") for each in of]),
        ("refused", [float(each.refused) for each in of]),
    ]


def _rank(found: Percentiles | None, rank: str) -> float:
    return 0.0 if found is None else float(getattr(found, rank))
