"""Logs, traces and monitors of a model service."""

from typing import Literal

from tandem_operator.api.markers import Api, HttpUrl, Labels


class Observability(Api, frozen=True, kw_only=True):
    """Logs, traces and monitors."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines."""
    otlp_traces_endpoint: HttpUrl | None = None
    """OpenTelemetry collector for traces, over HTTP; default: no traces."""
    service_monitor: bool = False
    """Create PodMonitors of gateways and workers; requires the Prometheus operator."""
    metrics_namespaces: Labels = {}
    """Labels of namespaces, such as that of Prometheus, whose pods the network policies allow to read metrics. Empty:
    none."""
