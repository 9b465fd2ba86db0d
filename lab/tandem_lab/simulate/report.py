"""Results of a run: one `PolicyReport` for each policy, and the trace's own limits next to them.

Equal inputs give equal reports, byte for byte: only `requests_per_minute` and `redis_share`, separate fields, depend on
the machine.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import msgspec

from tandem_engine.config import Role
from tandem_lab.bench.load import Percentiles, Slo, percentiles
from tandem_lab.simulate.replay import Outcome, Served
from tandem_services.gateway.access.tenants import SOLE_TENANT


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest worker over the mean, of workers that compute prompts; 1 is even."""

    outstanding: float
    """By requests at the moment, in the mean over time."""
    prompt_tokens: float
    """By prompt tokens computed in the whole run."""
    requests: float
    """By prompts in the whole run, whatever was cached of them."""


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got. Times are milliseconds."""

    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    e2e_ms: Percentiles | None


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's figures. Times are milliseconds."""

    requests: int
    refused: int
    refusals: dict[str, int]
    """Choices that were refused, by reason; those that left the queue with them are not counted."""
    gateway_wait_ms: Percentiles | None
    """In a gateway's queue, of those that got a worker."""
    block_hit_rate: float
    of_pooled_lru: float
    """`block_hit_rate` over that of one pooled LRU cache as large as all caches that save computing."""
    fetched_block_rate: float
    """Blocks that came from another worker, by those of all prompts."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    goodput_requests_per_s: float | None
    """None when no SLO was given."""
    output_tokens_per_s: float
    simulated_s: float
    """From the first arrival to the last token."""
    balance: Balance
    utilisation: float
    """Share of the simulated time that the workers spent in steps."""
    retractions: int
    """Times that a sequence gave its pages back to others and was computed again."""
    placements: dict[str, int]
    in_other_cells: int | None = None
    """Choices served in another cell than their gateway's; None of one cell."""
    tenants: dict[str, TenantReport]
    """Empty where the trace names none."""


class TraceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the trace alone."""

    requests: int
    blocks: int
    """Whole blocks of all prompts."""
    distinct_blocks: int
    cache_blocks: int
    """Of all workers that compute prompts, together."""
    infinite_cache_hit_rate: float
    pooled_lru_hit_rate: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    trace: TraceLimits
    policies: dict[str, PolicyReport]
    requests_per_minute: float
    """Replayed by this machine, all policies together."""
    redis_share: float
    """CPU seconds of Redis for one simulated second of one cell."""


def policy_report(outcome: Outcome, *, pooled: float, slo: Slo | None, cells: int = 1) -> PolicyReport:
    """`pooled`: block hit rate of the pooled LRU cache."""
    computing = [worker.done for worker in outcome.workers if worker.role is not Role.DECODE]
    blocks = sum(worker.done.prompt_blocks for worker in outcome.workers)
    hits = sum(worker.done.hit_blocks for worker in outcome.workers)
    hit_rate = hits / blocks if blocks else 0.0
    seconds = outcome.seconds or math.inf
    gaps: Counter[float] = Counter()
    for worker in outcome.workers:
        gaps.update(worker.done.gaps)
    good = [served for served in outcome.served if slo is not None and is_good(served, slo)]
    return PolicyReport(
        requests=len(outcome.served),
        refused=len(outcome.refused),
        refusals=dict(sorted(outcome.refusals.items())),
        gateway_wait_ms=percentiles(outcome.gateway_waits),
        block_hit_rate=hit_rate,
        of_pooled_lru=hit_rate / pooled if pooled else 1.0,
        fetched_block_rate=sum(worker.fetches.blocks for worker in outcome.workers) / blocks if blocks else 0.0,
        ttft_ms=percentiles([served.ttft_s for served in outcome.served]),
        itl_ms=weighted_percentiles(gaps),
        e2e_ms=percentiles([served.e2e_s for served in outcome.served]),
        goodput_requests_per_s=None if slo is None else len(good) / seconds,
        output_tokens_per_s=sum(served.request.total_output_tokens for served in outcome.served) / seconds,
        simulated_s=outcome.seconds,
        balance=Balance(
            outstanding=_ratio(outcome.outstanding_most, outcome.outstanding_mean),
            prompt_tokens=busiest_over_mean([done.computed_tokens for done in computing]),
            requests=busiest_over_mean([done.requests for done in computing]),
        ),
        utilisation=sum(worker.done.busy_s for worker in outcome.workers) / len(outcome.workers) / seconds,
        retractions=sum(worker.done.retractions for worker in outcome.workers),
        placements={placement.value: count for placement, count in sorted(outcome.placements.items())},
        in_other_cells=None if cells == 1 else outcome.in_other_cells,
        tenants=_by_tenant(outcome),
    )


def _by_tenant(outcome: Outcome) -> dict[str, TenantReport]:
    refused = Counter(request.tenant.name for request in outcome.refused)
    served: dict[str, list[Served]] = {name: [] for name in refused}
    for each in outcome.served:
        served.setdefault(each.request.tenant.name, []).append(each)
    return {
        name: TenantReport(
            requests=len(found),
            refused=refused[name],
            prompt_tokens=sum(each.request.prompt_tokens for each in found),
            output_tokens=sum(each.request.total_output_tokens for each in found),
            ttft_ms=percentiles([each.ttft_s for each in found]),
            e2e_ms=percentiles([each.e2e_s for each in found]),
        )
        for name, found in sorted(served.items())
        if name != SOLE_TENANT
    }


def is_good(served: Served, slo: Slo) -> bool:
    """Whether a request met every bound; ITL by its mean, as in `tandem bench serve`."""
    bounds = ((slo.ttft_ms, served.ttft_s), (slo.itl_ms, served.mean_gap_s), (slo.e2e_ms, served.e2e_s))
    return all(limit is None or value * 1e3 <= limit for limit, value in bounds)


def weighted_percentiles(counts: Mapping[float, int]) -> Percentiles | None:
    """`percentiles` of values (seconds) that occur as often as `counts` says."""
    total = sum(counts.values())
    if not total:
        return None
    ranked = sorted(counts)

    def rank(share: float) -> float:
        wanted, passed = math.ceil(share * total), 0
        for value in ranked:
            passed += counts[value]
            if passed >= wanted:
                return value * 1e3
        return ranked[-1] * 1e3

    mean = sum(value * 1e3 * count for value, count in counts.items()) / total
    return Percentiles(mean=mean, p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), max=ranked[-1] * 1e3)


def busiest_over_mean(values: Sequence[float]) -> float:
    """1 if no worker has done anything."""
    return _ratio(max(values) * len(values), sum(values))


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0


PANEL, GAP, LABELS, HEADER, ROW, PLOT_COLUMNS = 250, 30, 110, 46, 24, 3
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One figure, by policy."""

    title: str
    values: Mapping[str, float]
    line: float | None = None
    """A limit to draw across the bars."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The SVG text."""
    rows = -(-len(panels) // PLOT_COLUMNS)
    tallest = max((len(panel.values) for panel in panels), default=0)
    height = HEADER + tallest * ROW + GAP
    width = PLOT_COLUMNS * (LABELS + PANEL + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * height + 40}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{rows * height + 40}" fill="white"/>',
        f'<text x="{GAP}" y="26" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        left = GAP + (number % PLOT_COLUMNS) * (LABELS + PANEL + GAP)
        parts += _panel(panel, left, 40 + number // PLOT_COLUMNS * height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: int, top: int) -> list[str]:
    largest = max([*panel.values.values(), panel.line or 0.0, 1e-12])
    # Half of the label's width is kept for the number behind the longest bar.
    scale = (PANEL - LABELS / 2) / largest
    parts = [f'<text x="{left}" y="{top + 24}" font-weight="bold">{escape(panel.title)}</text>']
    for row, (name, value) in enumerate(panel.values.items()):
        y = top + HEADER - 10 + row * ROW
        length = round(value * scale, 1)
        color = COLORS[row % len(COLORS)]
        parts += [
            f'<text x="{left + LABELS - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left + LABELS}" y="{y}" width="{length}" height="{ROW - 6}" fill="{color}"/>',
            f'<text x="{left + LABELS + length + 5}" y="{y + 13}">{value:.4g}</text>',
        ]
    if panel.line is not None:
        x = round(left + LABELS + panel.line * scale, 1)
        bottom = top + HEADER - 10 + len(panel.values) * ROW
        parts.append(f'<path d="M{x} {top + HEADER - 14}V{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    return parts


Figure = Callable[[PolicyReport], float | None]


def _p(of: Callable[[PolicyReport], Percentiles | None], rank: str) -> Figure:
    def value(report: PolicyReport) -> float | None:
        found = of(report)
        return None if found is None else float(getattr(found, rank))

    return value


COLUMNS: tuple[tuple[str, Figure], ...] = (
    ("block hit rate", lambda report: report.block_hit_rate),
    ("of pooled LRU", lambda report: report.of_pooled_lru),
    ("fetched blocks", lambda report: report.fetched_block_rate),
    ("TTFT p50 ms", _p(lambda report: report.ttft_ms, "p50")),
    ("TTFT p99 ms", _p(lambda report: report.ttft_ms, "p99")),
    ("gateway wait p50 ms", _p(lambda report: report.gateway_wait_ms, "p50")),
    ("gateway wait p99 ms", _p(lambda report: report.gateway_wait_ms, "p99")),
    ("ITL p50 ms", _p(lambda report: report.itl_ms, "p50")),
    ("ITL p99 ms", _p(lambda report: report.itl_ms, "p99")),
    ("E2E mean ms", _p(lambda report: report.e2e_ms, "mean")),
    ("goodput req/s", lambda report: report.goodput_requests_per_s),
    ("busiest/mean, at once", lambda report: report.balance.outstanding),
    ("busiest/mean, tokens", lambda report: report.balance.prompt_tokens),
    ("busiest/mean, requests", lambda report: report.balance.requests),
    ("retractions", lambda report: report.retractions),
    ("in other cells", lambda report: report.in_other_cells),
    ("refused", lambda report: report.refused),
)


def table(report: Report) -> str:
    """Aligned lines: the trace's limits, then a column for each policy."""
    trace = report.trace
    lines = [
        f"{trace.requests} requests, {trace.blocks} blocks, {trace.distinct_blocks} distinct; "
        f"cache of {trace.cache_blocks} blocks",
        f"block hit rate of one pooled LRU cache of that size {trace.pooled_lru_hit_rate:.4f}, "
        f"of an infinite one {trace.infinite_cache_hit_rate:.4f}",
        "",
    ]
    names = list(report.policies)
    wide = max(14, *(len(name) + 2 for name in names))
    lines.append(" " * 24 + "".join(f"{name:>{wide}}" for name in names))
    for title, figure in COLUMNS:
        values = [figure(report.policies[name]) for name in names]
        if any(value is not None for value in values):
            lines.append(f"{title:<24}" + "".join(f"{_shown(value):>{wide}}" for value in values))
    for name, each in report.policies.items():
        if each.refusals:
            lines.append(f"refused by {name}: " + ", ".join(f"{why} {count}" for why, count in each.refusals.items()))
        lines += _tenant_lines(name, each)
    lines += [
        "",
        f"replayed {report.requests_per_minute:.0f} requests per minute; "
        f"Redis took {report.redis_share:.4f} s of CPU for a second of a cell",
    ]
    return "\n".join(lines)


def _tenant_lines(name: str, report: PolicyReport) -> list[str]:
    return [
        f"{name}, tenant {tenant}: {each.requests} served, {each.refused} refused"
        + ("" if each.ttft_ms is None else f", TTFT p50 {each.ttft_ms.p50:.1f} p99 {each.ttft_ms.p99:.1f} ms")
        for tenant, each in report.tenants.items()
    ]


def plot(report: Report, title: str) -> str:
    """The same as SVG; the dashed line of the hit rate is that of the pooled LRU cache."""
    panels = []
    for name, figure in COLUMNS:
        values = {policy: value for policy, each in report.policies.items() if (value := figure(each)) is not None}
        if values and name != "of pooled LRU" and any(values.values()):
            line = report.trace.pooled_lru_hit_rate if name == "block hit rate" else None
            panels.append(Panel(title=name, values=values, line=line))
    return draw(title, panels)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value < 10 else f"{value:.1f}"


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
    """From the request of a worker until its removal."""
    good_per_worker_hour: float
    """Requests within every bound for an hour of one worker."""
    workers_most: int
    scalings: int
    """Periods in which the number of workers changed."""
    ttft_ms: Percentiles | None
    e2e_ms: Percentiles | None


class OverHpa(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler's figures over those of hpa."""

    worker_hours: float
    slo_attainment: float


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--autoscale --json` prints."""

    requests: int
    simulated_s: float
    scalers: dict[str, ScalerReport]
    over_hpa: dict[str, OverHpa]
    """Each scaler compared with hpa; empty where that is not one of them."""
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


def over_hpa(scalers: Mapping[str, ScalerReport]) -> dict[str, OverHpa]:
    """Ratios within one run; empty without hpa, and where hpa has none of what is compared."""
    hpa = scalers.get("hpa")
    if hpa is None or not hpa.worker_hours or not hpa.slo_attainment:
        return {}
    return {
        name: OverHpa(
            worker_hours=each.worker_hours / hpa.worker_hours, slo_attainment=each.slo_attainment / hpa.slo_attainment
        )
        for name, each in scalers.items()
    }


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
    if report.over_hpa:
        ratios = (report.over_hpa[name].worker_hours for name in names)
        lines.append(f"{'worker hours / hpa':<26}" + "".join(f"{value:>{wide}.4g}" for value in ratios))
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
