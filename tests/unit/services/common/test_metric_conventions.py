"""Names, units, labels and help texts of all metrics follow https://prometheus.io/docs/practices/naming/."""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric

from tandem_testing.exported_metrics import gateway_metrics, labels_of_series, router_metrics, worker_metrics

ROOT = Path(__file__).resolve().parents[4]
OF_VLLM = {"vllm:lora_requests_info"}
"""Under vLLM's own name, because other routers read them by it."""
EXPORTED = gateway_metrics() + router_metrics() + worker_metrics()
METRICS = [metric for metric in EXPORTED if metric.name not in OF_VLLM]
OTHER_UNITS = re.compile(r"_(ms|us|ns|milliseconds|minutes|kib|mib|gib|kilobytes|megabytes|percent)(_|$)")
OF_SCRAPES = {"job", "instance", "le", "quantile"}
"""Labels that Prometheus sets itself."""
UNBOUNDED = {"request_id", "rid", "user", "path", "url", "prompt", "incarnation", "digest", "key"}


@pytest.fixture(params=METRICS, ids=[metric.name for metric in METRICS])
def metric(request) -> Metric:
    return request.param


def test_names_are_plain_and_begin_with_the_product(metric):
    assert re.fullmatch(r"tandem_(release|(gateway|router|worker|link)(_[a-z0-9]+)+)", metric.name)


def test_only_counters_end_in_total(metric):
    named_total = all(s.name.endswith(("_total", "_created")) for s in metric.samples)
    assert named_total == (metric.type == "counter")
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))


def test_units_are_base_units(metric):
    assert not OTHER_UNITS.search(metric.name)
    if metric.type == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes", "_ratio", "_tokens"))


def test_help_text_can_be_read_alone(metric):
    assert re.match(r"[A-Z0-9]", metric.documentation)
    assert not re.match(r"(Of (it|them)|Their|Those|The same)\b", metric.documentation)


def test_metric_labels_are_few_bounded_and_not_reserved(metric):
    assert metric.samples, "not exercised, so its labels are not known"
    labels = set().union(*(sample.labels for sample in metric.samples)) - (
        {"le"} if metric.type == "histogram" else set()
    )
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in labels)
    assert len(labels) <= 4
    assert not labels & (OF_SCRAPES | UNBOUNDED)


def test_no_two_families_have_one_name():
    names = [metric.name for metric in EXPORTED]
    assert set(names) >= OF_VLLM
    assert sorted(names) == sorted(set(names))


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_metrics_that_exist(document):
    series = labels_of_series(METRICS)
    families = series.keys() | {metric.name for metric in METRICS if metric.type == "histogram"}
    named = set(re.findall(r"tandem_(?:gateway|worker|link)_[a-z0-9_]*", document.read_text("utf-8")))
    begun = {name for name in named if name.endswith("_") and any(family.startswith(name) for family in families)}
    assert named - begun <= families
