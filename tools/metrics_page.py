"""Prints docs/metrics.md, the reference of all Prometheus metrics, from what each process exports.

    PYTHONPATH=tests/support .venv/bin/python tools/metrics_page.py > docs/metrics.md

A test compares the page with what this prints.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric

from tandem_testing.exported_metrics import gateway_metrics, router_metrics, worker_metrics

HEAD = """# Metrics

Every Prometheus metric of gateways, stand-alone routers and workers. `tools/metrics_page.py` writes this page from what
the processes export.
[Metrics, logs and traces](observability.md) describes the most important metrics,
[operator](operator.md#metrics) those of the operator.
Every process also exports `process_*` and `python_*` metrics.
"""


def page() -> str:
    sections = (("Gateway", gateway_metrics()), ("Router", router_metrics()), ("Worker", worker_metrics()))
    return "\n".join([HEAD, *(line for title, metrics in sections for line in section(title, metrics))])


def section(title: str, metrics: Sequence[Metric]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in sorted(metrics, key=lambda metric: metric.name):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        yield f"| `{name}` | {metric.type} | {labels(metric)} | {metric.documentation} |"
    yield ""


def labels(metric: Metric) -> str:
    found = {label for sample in metric.samples for label in sample.labels} - {"le"}
    return ", ".join(f"`{label}`" for label in sorted(found))


if __name__ == "__main__":
    print(page())
