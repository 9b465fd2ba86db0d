"""Names, units, labels and help texts of all metrics follow https://prometheus.io/docs/practices/naming/."""

import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Metric

from tandem_testing.each_case import check_each
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


def check_metrics(check: Callable[[Metric], object]) -> None:
    check_each(METRICS, check, name=lambda metric: metric.name)


def test_names_are_plain_and_begin_with_the_product():
    check_metrics(has_plain_name)


def has_plain_name(metric: Metric) -> None:
    assert re.fullmatch(r"tandem_(release|(gateway|router|worker|link)(_[a-z0-9]+)+)", metric.name)


def test_only_counters_end_in_total():
    check_metrics(ends_in_total_if_a_counter)


def ends_in_total_if_a_counter(metric: Metric) -> None:
    named_total = all(s.name.endswith(("_total", "_created")) for s in metric.samples)
    assert named_total == (metric.type == "counter")
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))


def test_units_are_base_units():
    check_metrics(has_base_unit)


def has_base_unit(metric: Metric) -> None:
    assert not OTHER_UNITS.search(metric.name)
    if metric.type == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes", "_ratio", "_tokens"))


def test_help_text_can_be_read_alone():
    check_metrics(has_help_text_of_its_own)


def has_help_text_of_its_own(metric: Metric) -> None:
    assert re.match(r"[A-Z0-9]", metric.documentation)
    assert not re.match(r"(Of (it|them)|Their|Those|The same)\b", metric.documentation)


def test_metric_labels_are_few_bounded_and_not_reserved():
    check_metrics(has_few_labels)


def has_few_labels(metric: Metric) -> None:
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


def test_documents_name_only_metrics_that_exist():
    families = labels_of_series(METRICS).keys() | {metric.name for metric in METRICS if metric.type == "histogram"}

    def names_existing_metrics(document: Path) -> None:
        named = set(re.findall(r"tandem_(?:gateway|worker|link)_[a-z0-9_]*", document.read_text("utf-8")))
        begun = {name for name in named if name.endswith("_") and any(family.startswith(name) for family in families)}
        assert named - begun <= families

    check_each(DOCUMENTS, names_existing_metrics, name=lambda path: path.name)
