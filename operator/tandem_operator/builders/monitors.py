"""PodMonitors of a ModelService, for clusters with the Prometheus operator: one for gateways, one for workers."""

from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL, labels_of, selector_of
from tandem_operator.builders.served import Served

API_VERSION = "monitoring.coreos.com/v1"
PORTS = {"gateway": "admin", "worker": "health"}
"""Where `/metrics` is, by component: names of container ports."""


def pod_monitors(service: Served) -> list[Manifest]:
    """None unless they are wanted."""
    if not service.spec.observability.service_monitor:
        return []
    return [_monitor(service, component, port) for component, port in PORTS.items()]


def _monitor(service: Served, component: str, port: str) -> Manifest:
    labels = labels_of(service.name, component)
    return {
        "apiVersion": API_VERSION,
        "kind": "PodMonitor",
        "metadata": {"name": f"{service.name}-{component}", "namespace": service.namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": selector_of(labels)},
            "podTargetLabels": [SERVICE_LABEL, ROLE_LABEL, REVISION_LABEL],
            "podMetricsEndpoints": [{"port": port, "path": "/metrics"}],
        },
    }
