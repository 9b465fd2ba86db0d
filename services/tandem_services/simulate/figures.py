"""A report as a table for people and as a plot."""

from collections.abc import Callable

from tandem_services.loadgen.summary import Percentiles
from tandem_services.simulate.bar_plot import Panel, draw
from tandem_services.simulate.report import PolicyReport, Report

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
    lines += ["", f"replayed {report.requests_per_minute:.0f} requests per minute"]
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
