"""Every series that the operator reads is one that workers and gateways export, with the labels that it reads."""

from tandem_operator.telemetry.exposition import (
    GATEWAY_LATENCY_NAMES,
    GATEWAY_NAMES,
    LINK_NAMES,
    WORKER_LATENCY_NAMES,
    WORKER_NAMES,
    Exposition,
)
from tandem_operator.telemetry.pod_metrics import GatewayFigures, WorkerFigures
from tandem_testing.exported_metrics import exposition_of, gateway_metrics, labels_of_series, worker_metrics


def exposition(metrics) -> Exposition:
    return Exposition.parse(exposition_of(metrics).decode())


def test_workers_export_what_is_read_of_them():
    exported = labels_of_series(worker_metrics())
    assert exported.keys() >= WORKER_NAMES | LINK_NAMES | WORKER_LATENCY_NAMES
    assert "role" in exported["tandem_worker_role"]
    assert "peer" in exported["tandem_link_conditions"]
    assert {"peer", "transport"} <= exported["tandem_link_bytes_per_second"]


def test_gateways_export_what_is_read_of_them():
    exported = labels_of_series(gateway_metrics())
    assert exported.keys() >= GATEWAY_NAMES | GATEWAY_LATENCY_NAMES
    assert "factor" in exported["tandem_gateway_latency_factor"]
    assert {"objective", "result"} <= exported["tandem_gateway_slo_requests_total"]


def test_worker_exposition_gives_metrics():
    figures = WorkerFigures.of(exposition(worker_metrics()))
    assert (figures.serves, figures.waiting, figures.places, figures.pages) == ("decode", 1, 8, 100)
    assert figures.tokens_per_s == 1000
    assert not figures.slow_links
    assert figures.step_fit == (0.004, 1e-4, 1e-7)


def test_gateway_exposition_gives_metrics():
    figures = GatewayFigures.of(exposition(gateway_metrics()))
    assert figures.waiting == 1
    assert figures.totals.finished == 1
    assert figures.totals.finished_s == 0.3
    assert (figures.latency.good, figures.latency.judged) == (1, 1)
    assert figures.factors is not None
    assert figures.processes == 1
