"""Figures of a run: percentiles with weights, balance, goodput, table and plot."""

from xml.etree import ElementTree

import pytest

from tandem_lab.bench.load import Slo, percentiles
from tandem_lab.simulate.replay import Served
from tandem_lab.simulate.report import (
    Balance,
    PolicyReport,
    Report,
    TenantReport,
    TraceLimits,
    busiest_over_mean,
    is_good,
    plot,
    table,
    weighted_percentiles,
)
from tandem_lab.simulate.requests import SimulatedRequest


def served(first: float, last: float, tokens: int = 11) -> Served:
    request = SimulatedRequest(
        number=0, at=1.0, prompt_tokens=5, output_tokens=tokens, blocks=(1,), chain=(), session="s"
    )
    return Served(request=request, first=first, last=last, mean_gap_s=(last - first) / max(1, tokens - 1))


def report_of(hit_rate: float) -> PolicyReport:
    return PolicyReport(
        requests=10,
        refused=3,
        refusals={"context_length": 1, "no_room": 2},
        gateway_wait_ms=percentiles([0.0, 1.5]),
        block_hit_rate=hit_rate,
        of_pooled_lru=hit_rate / 0.4,
        fetched_block_rate=0.01,
        ttft_ms=percentiles([0.1, 0.2]),
        itl_ms=None,
        e2e_ms=percentiles([1.0]),
        goodput_requests_per_s=None,
        output_tokens_per_s=1.0,
        simulated_s=5.0,
        balance=Balance(outstanding=1.5, prompt_tokens=1.1, requests=1.0),
        utilisation=0.5,
        retractions=0,
        placements={"alone": 10},
        tenants={
            "search": TenantReport(
                requests=10,
                refused=2,
                prompt_tokens=50,
                output_tokens=110,
                ttft_ms=percentiles([0.1, 0.2]),
                e2e_ms=None,
            )
        },
    )


REPORT = Report(
    trace=TraceLimits(
        requests=10,
        blocks=100,
        distinct_blocks=60,
        cache_blocks=6,
        infinite_cache_hit_rate=0.5,
        pooled_lru_hit_rate=0.4,
    ),
    policies={"locality": report_of(0.38), "<odd> & even": report_of(0.2)},
    requests_per_minute=30_000.0,
    redis_share=0.02,
)


def test_weighted_percentiles_are_those_of_the_repeated_values():
    counts = {0.01: 90, 0.2: 9, 1.5: 1}
    repeated = [value for value, count in counts.items() for _ in range(count)]
    weighted, plain = weighted_percentiles(counts), percentiles(repeated)
    assert weighted is not None
    assert plain is not None
    for rank in ("p50", "p90", "p99", "max"):
        assert getattr(weighted, rank) == getattr(plain, rank)
    assert weighted.mean == pytest.approx(plain.mean)
    assert weighted_percentiles({}) is None


def test_balance_is_one_when_even_or_idle():
    assert busiest_over_mean([2.0, 2.0]) == 1.0
    assert busiest_over_mean([3.0, 1.0]) == 1.5
    assert busiest_over_mean([0.0, 0.0]) == 1.0


def test_request_is_good_within_every_bound():
    on_time = served(first=1.5, last=2.5)
    assert is_good(on_time, Slo(ttft_ms=500, itl_ms=100, e2e_ms=1500))
    assert not is_good(on_time, Slo(ttft_ms=499))
    assert not is_good(on_time, Slo(itl_ms=99))
    assert not is_good(on_time, Slo(e2e_ms=1499))
    assert is_good(served(first=1.0, last=1.0, tokens=1), Slo(itl_ms=1))


def test_table_lists_policies_and_omits_absent_metrics():
    lines = table(REPORT).splitlines()
    assert any("pooled LRU" in line and "0.4000" in line for line in lines)
    assert any(line.startswith("of pooled LRU") and "0.9500" in line and "0.5000" in line for line in lines)
    assert not any(line.startswith(("ITL", "goodput")) for line in lines)


def test_plot_is_svg_with_bar_per_policy_and_dashed_limit():
    root = ElementTree.fromstring(plot(REPORT, "a < b"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert "block hit rate" in texts
    assert texts.count("<odd> & even") == texts.count("locality") > 3
    assert sum("stroke-dasharray" in path.attrib for path in root.iter("{http://www.w3.org/2000/svg}path")) == 1
