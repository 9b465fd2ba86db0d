"""What the parts of a model service tell of themselves."""

from typing import Literal

from tandem_operator.api.markers import Api, HttpUrl, Labels


class Observability(Api, frozen=True, kw_only=True):
    """What the parts tell of themselves."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    otlp_traces_endpoint: HttpUrl | None = None
    """OpenTelemetry collector for traces, over HTTP; without it no traces."""
    service_monitor: bool = False
    """Make PodMonitors of gateways and workers, where the Prometheus operator is installed."""
    metrics_namespaces: Labels = {}
    """Labels of namespaces whose pods may read metrics, past the network policies: Prometheus's. Empty: none may."""
