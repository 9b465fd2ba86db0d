"""A real Prometheus: it scrapes a gateway, workers and the operator's figures, and answers what our files ask it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_operator.telemetry.external import ScalingMetrics
from tandem_operator.telemetry.samples import LoadReading
from tandem_services.common.sockets import free_port
from tandem_testing.helm_library import ROOT
from tandem_testing.kube_cluster import service_of
from tandem_testing.neighbours import NEEDS_NEIGHBOURS, prometheus
from tandem_testing.system import System
from tandem_testing.waiting import wait_for

pytestmark = NEEDS_NEIGHBOURS

SCRAPE_S = 1
PATIENCE_S = 60.0
ADAPTER = ROOT / "examples/scaling/prometheus-adapter.yaml"


@pytest.fixture(scope="module")
def system(tmp_path_factory) -> Iterator[System]:
    """A gateway, a prefill and a decode worker that have answered a request."""
    one = System.start(tmp_path_factory.mktemp("system"))
    try:
        body = {"model": "tandem-mini", "prompt": "one two", "max_tokens": 4}
        httpx.post(f"{one.url}/v1/completions", json=body, timeout=120).raise_for_status()
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def figures() -> ScalingMetrics:
    """The operator's, of a service under load."""
    figures = ScalingMetrics()
    prefill = PrefillLoad(queued_tokens=0.0, oldest_wait_s=2.0, arrived_tokens_per_s=2500.0, worker_tokens_per_s=1000)
    decode = DecodeLoad(
        running=12.0,
        waiting=0.0,
        oldest_wait_s=0.0,
        arrived_per_s=0,
        seconds_each=10,
        worker_places=10,
        used_pages=150,
        worker_pages=100,
    )
    load = Load(at=100.0, age_s=1.0, prefill=prefill, decode=decode, held=0.0)
    figures.put(("models", "chat"), LoadReading(load=load, reason=""), scaling_config(service_of()))
    return figures


@pytest.fixture(scope="module")
def operator_port(figures: ScalingMetrics) -> Iterator[int]:
    """Where they are exported."""
    registry = CollectorRegistry()
    registry.register(figures)
    port = free_port("127.0.0.1")
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def scraped(system: System, operator_port: int, tmp_path_factory) -> Iterator[httpx.Client]:
    """A Prometheus whose targets, /metrics of each process, are all up."""
    workers = [url.partition("://")[2] for url in system.workers.values()]
    targets = {
        "gateway": [system.url.partition("://")[2]],
        "worker": workers,
        "operator": [f"127.0.0.1:{operator_port}", "127.0.0.1:1"],
    }
    jobs = [{"job_name": job, "static_configs": [{"targets": found}]} for job, found in targets.items()]
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
    with prometheus(tmp_path_factory.mktemp("prometheus"), config) as client:
        wait_for(
            lambda: len(query(client, "up == 1")) == 2 + len(workers),
            PATIENCE_S,
            lambda: client.get("/api/v1/targets").text,
        )
        yield client


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Result of an instant query. Raises `AssertionError` with what Prometheus says of it."""
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_processes_are_scraped(scraped):
    assert query(scraped, "sum(tandem_gateway_requests_total) > 0")
    names = scraped.get("/api/v1/label/__name__/values").json()["data"]
    assert any(name.startswith("tandem_worker_") or name.startswith("tandem_engine_") for name in names), names


def panels() -> Iterator[str]:
    """Expressions of the dashboard, with its variables filled in."""
    for path in sorted((ROOT / "charts/tandem/dashboards").glob("*.json")):
        for one in re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', path.read_text()):
            text = json.loads(one)
            text = text.replace("$__rate_interval", "1m").replace("$__range", "5m").replace("$__interval", "1m")
            yield re.sub(r"\$\{?\w+(?::\w+)?\}?", ".*", text)


def test_every_expression_of_the_dashboard_is_understood(scraped):
    found = list(panels())
    assert len(found) >= 10
    for expression in found:
        query(scraped, expression)


def test_expressions_of_the_dashboard_have_data(scraped):
    """Of a third: others need devices, adapters or failures. Rates need a few scrapes."""

    def empty() -> list[str]:
        return [expression for expression in panels() if not query(scraped, expression)]

    third = len(list(panels())) // 3
    wait_for(lambda: len(list(panels())) - len(empty()) >= third, PATIENCE_S, lambda: "\n".join(empty()))


def test_prometheus_adapter_metric_equals_keda_metric(scraped, figures):
    """The query that prometheus-adapter makes of its rule for an HPA, and the JSON of the operator."""
    [rule] = yaml.safe_load(ADAPTER.read_text())["rules"]["external"]
    series = query(scraped, re.sub(r"\s", "", rule["seriesQuery"]))
    assert "tandem_scaling_workers_needed" in {one["metric"]["__name__"] for one in series}
    for hpa in yaml.safe_load_all((ROOT / "examples/scaling/hpa.yaml").read_text()):
        [metric] = hpa["spec"]["metrics"]
        wanted = metric["external"]["metric"]
        labels = {"service_namespace": hpa["metadata"]["namespace"], **wanted["selector"]["matchLabels"]}
        matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
        text = rule["metricsQuery"].replace("<<.Series>>", wanted["name"]).replace("<<.LabelMatchers>>", matchers)
        [sample] = query(scraped, text)
        status, document = figures.answer("models", "chat", labels["role"])
        assert (status, float(sample["value"][1])) == (200, document["workersNeeded"])
        assert document["workersNeeded"] > 1
