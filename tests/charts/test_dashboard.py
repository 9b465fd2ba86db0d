"""The committed dashboard is what its script writes, and names only metrics and labels that exist."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tandem_testing.each_case import check_each
from tandem_testing.exported_metrics import gateway_metrics, labels_of_series, worker_metrics

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "charts" / "tandem" / "dashboards" / "tandem.json"
DASHBOARD = json.loads(COMMITTED.read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
EXPORTED = {source: labels_of_series(of()) for source, of in (("gateway", gateway_metrics), ("worker", worker_metrics))}
SERIES = EXPORTED["gateway"] | EXPORTED["worker"]
OF_SCRAPES = {"instance", "job"}
"""Labels that Prometheus gives to every series."""

WORDS_OF_PROMQL = {"by", "histogram_quantile", "or", "rate", "sum", "vector"}
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SELECTOR = re.compile(rf"({NAME})\{{([^}}]*)\}}(\[\$__rate_interval\])?")
MATCHER = re.compile(rf'({NAME})(?:=~|!~|!=|=)"[^"]*"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def check_targets(check: Callable[[dict[str, Any]], object]) -> None:
    names = {id(target): f"{title}-{target['refId']}" for title, target in TARGETS}
    check_each([target for _, target in TARGETS], check, name=lambda target: names[id(target)])


def selectors(expr: str) -> list[tuple[str, set[str], bool]]:
    """Each series of an expression with the labels it is matched by, and whether it is taken over a span of time."""
    return [(name, set(MATCHER.findall(labels)), bool(span)) for name, labels, span in SELECTOR.findall(expr)]


def groupings(expr: str) -> set[str]:
    return {label.strip() for labels in GROUPING.findall(expr) for label in labels.split(",")}


def test_committed_dashboard_equals_generated_one(tmp_path):
    written = tmp_path / "tandem.json"
    command = [sys.executable, str(ROOT / "tools" / "dashboard" / "write.py"), str(written)]
    subprocess.run(command, check=True, capture_output=True)
    assert written.read_text("utf-8") == COMMITTED.read_text("utf-8"), "run: python tools/dashboard/write.py"


def test_dashboard_expressions_use_exported_metrics_only():
    check_targets(uses_exported_metrics_only)


def uses_exported_metrics_only(target: dict[str, Any]) -> None:
    rest = SELECTOR.sub(" ", target["expr"])
    words = set(re.findall(NAME, GROUPING.sub(" by ", rest)))
    assert words <= WORDS_OF_PROMQL, "neither PromQL nor a metric with a selector"
    named = {name for name, _, _ in selectors(target["expr"])}
    assert named
    assert named <= SERIES.keys()


def test_every_label_in_an_expression_is_one_of_its_metric():
    check_targets(uses_labels_of_its_metrics)


def uses_labels_of_its_metrics(target: dict[str, Any]) -> None:
    used = selectors(target["expr"])
    for name, matched, _ in used:
        assert matched <= SERIES[name] | OF_SCRAPES
        assert groupings(target["expr"]) <= SERIES[name] | OF_SCRAPES


def test_dashboard_series_are_exported_by_their_source():
    check_targets(names_series_of_its_source)


def names_series_of_its_source(target: dict[str, Any]) -> None:
    for name, labels in re.findall(rf"({NAME})\{{([^}}]*)\}}", target["expr"]):
        source = "gateway" if 'instance=~"$gateway"' in labels else "worker"
        assert name in EXPORTED[source]


def test_counters_are_rates_and_gauges_are_not():
    check_targets(takes_rates_of_counters_only)


def takes_rates_of_counters_only(target: dict[str, Any]) -> None:
    for name, _, over_time in selectors(target["expr"]):
        assert over_time == name.endswith(("_total", "_bucket", "_sum", "_count"))
    assert target["expr"].count("rate(") == target["expr"].count("[$__rate_interval]")


def test_legend_names_labels_that_the_result_has():
    check_targets(has_a_legend_of_its_labels)


def has_a_legend_of_its_labels(target: dict[str, Any]) -> None:
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    grouped = groupings(target["expr"]) - {"le"}
    if "sum" in target["expr"]:
        assert shown == grouped
    else:
        [(name, _, _)] = selectors(target["expr"])
        assert shown <= SERIES[name] | OF_SCRAPES
    assert target["legendFormat"]


def test_quantiles_are_of_histograms():
    quantiles = [target["expr"] for _, target in TARGETS if "histogram_quantile" in target["expr"]]
    assert quantiles
    for expr in quantiles:
        assert re.fullmatch(r"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(\w+_bucket\{[^}]*\}\[.*\]\)\)\)", expr)


@pytest.mark.parametrize("variable", DASHBOARD["templating"]["list"][1:], ids=lambda variable: variable["name"])
def test_dashboard_variables_use_exported_metrics_and_are_used(variable):
    name = re.fullmatch(rf"label_values\(({NAME}), instance\)", variable["query"]["query"]).group(1)
    assert name in EXPORTED[variable["name"]]
    assert any(f"${variable['name']}" in target["expr"] for _, target in TARGETS)


def test_dashboard_panels_have_description_unit_and_unique_title():
    for panel in PANELS:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    titles = [panel["title"] for panel in PANELS]
    assert sorted(titles) == sorted(set(titles))


def test_panels_do_not_overlap_on_the_grid():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not [(a, b) for a, b in combinations(places, 2) if overlap(a, b)]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert sorted(ids) == sorted(set(ids))


def overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
    )


@pytest.mark.parametrize(
    "subject",
    [
        "tandem_gateway_time_to_first_token_seconds_bucket",
        "tandem_gateway_inter_token_latency_seconds_bucket",
        "tandem_gateway_e2e_request_latency_seconds_bucket",
        "tandem_gateway_queue_wait_seconds_bucket",
        "tandem_gateway_kv_transfer_seconds_bucket",
        "tandem_gateway_kv_transfer_exposed_seconds_bucket",
        "tandem_gateway_route_decisions_total",
        "tandem_gateway_resumptions_total",
        "tandem_worker_prefix_cache_hit_tokens_total",
        "tandem_worker_kv_digest_mismatches_total",
        "tandem_worker_kv_cache_usage_perc",
    ],
)
def test_dashboard_answers_the_first_questions(subject):
    assert any(subject in target["expr"] for _, target in TARGETS)
