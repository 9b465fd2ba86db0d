"""Disruption budgets, network policies and pod monitors of a ModelService."""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem_operator.api.model_service import EgressRule
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.gateway import ADMIN_PORT, PORT
from tandem_operator.builders.inference_pool import GRPC_PORT
from tandem_operator.builders.inference_pool import PORT as ROUTER_PORT
from tandem_operator.builders.naming import (
    GATEWAY_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    Labels,
    deployment_name,
    labels_of,
    selector_of,
)
from tandem_operator.builders.redis import PORT as REDIS_PORT
from tandem_operator.builders.redis import redis_ports
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import FOLLOWER, HEALTH_PORT, worker_labels
from tandem_operator.settings import OperatorSettings

DNS = (53, 5353)
"""Of a cluster's DNS servers; on OpenShift their pods have the second."""

HTTP, HTTPS = 80, 443

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that every namespace has since Kubernetes 1.21."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSet:
    """Workers of one role of one revision, which have a disruption budget of their own."""

    role: RoleName
    revision: str
    grouped: bool
    """Whether a worker has several pods."""
    exchanging: bool = False
    """Whether its pods are being exchanged for newer ones of the same revision."""


def disruption_budgets(service: Served, settings: OperatorSettings, workers: Iterable[WorkerSet]) -> list[Manifest]:
    """One for each of `workers`, and one for gateways: a node drain takes one pod of each at a time.

    Revisions have budgets of their own, so that pods of a new one that never become ready do not keep those of the old
    one from moving to another node.
    """
    budgets = []
    for one in workers:
        name = deployment_name(service.name, one.role, one.revision)
        # What an exchange takes away by itself leaves a drain its own pod: an exchange may be stuck.
        most = 1 + (service.spec.rollout.max_unavailable if one.exchanging else 0)
        labels = worker_labels(service, one.role, one.revision)
        budgets.append(_budget(service, name, labels, settings, most))
        if one.grouped:
            # A group is gone when any of its pods is.
            labels = labels_of(service.name, FOLLOWER, role=one.role, revision=one.revision)
            budgets.append(_budget(service, f"{name}-followers", labels, settings, most))
    if service.has_gateways and service.spec.gateway.replicas > 1:
        budgets.append(_budget(service, f"{service.name}-gateway", service.labels("gateway"), settings, 1))
    return budgets


def _grouped(service: Served) -> list[RoleName]:
    """Roles whose workers have several pods."""
    return [role for role in ROLES if service.nodes(role) > 1]


def _budget(service: Served, name: str, labels: Labels, settings: OperatorSettings, most: int) -> Manifest:
    api = settings.apis.pod_disruption_budget
    spec: Manifest = {"maxUnavailable": most, "selector": {"matchLabels": selector_of(labels)}}
    if api == "policy/v1":
        # Pods that are not ready serve nothing that a budget could protect, and may be the reason for the drain.
        spec["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    return {
        "apiVersion": api,
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": service.namespace, "labels": labels},
        "spec": spec,
    }


def network_policies(service: Served, settings: OperatorSettings, other_ports: Iterable[int] = ()) -> list[Manifest]:
    """Only required clients reach these pods: clients the gateway, gateways and workers each other and Redis. The pods
    themselves reach each other, and outside of the service what the spec names. Gateways of a ModelGateway reach the
    pods of all services of the namespace, whose own policies decide. Gateways of other cells reach workers and Redis,
    and the gateways of this service those of other cells.

    Args:
        other_ports: of external Redis of the services behind a ModelGateway.
    """
    security = service.spec.security
    if not security.network_policies:
        return []
    parts: Manifest = {"podSelector": {"matchLabels": service.pods_selector}}
    reference = service.spec.gateway_ref
    fleet = [parts]
    if reference is not None:
        fleet.append({"podSelector": {"matchLabels": {GATEWAY_LABEL: reference.name}}})
    cells = [labels_of(cell.service, "gateway") for cell in service.spec.cells]
    fleet += [{"podSelector": {"matchLabels": selector_of(labels)}} for labels in cells]
    operator: Manifest = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: settings.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    }
    prometheus: list[Manifest] = []
    if service.spec.observability.metrics_namespaces:
        prometheus = [{"namespaceSelector": {"matchLabels": service.spec.observability.metrics_namespaces}}]
    clients: Manifest = {"ports": [_port(PORT)]}
    if security.client_namespaces:
        clients["from"] = [{"namespaceSelector": {"matchLabels": security.client_namespaces}}, parts]
    reach: dict[str, list[Manifest]] = {}
    if service.has_gateways:
        reach["gateway"] = [
            clients,
            {"from": [operator], "ports": [_port(PORT)]},
            {"from": [operator, *prometheus], "ports": [_port(ADMIN_PORT)]},
        ]
    if not service.shared:
        # Engines and NIXL choose their ports freely; the sockets reject peers without the service's keys.
        reach["worker"] = [{"from": fleet}, {"from": [operator, *prometheus], "ports": [_port(HEALTH_PORT)]}]
    if _grouped(service):
        # Their tensors are not secret, access to them is: no other pod reaches them.
        reach[FOLLOWER] = reach["worker"]
    if service.spec.gateway.inference_pool is not None:
        # Data planes of Inference Gateways may run in any namespace, and the protocol has no token.
        reach["router"] = [{"ports": [_port(GRPC_PORT)]}]
        if prometheus:
            reach["router"].append({"from": prometheus, "ports": [_port(ROUTER_PORT)]})
    if service.spec.redis.managed is not None:
        reach["redis"] = [{"from": fleet, "ports": [_port(REDIS_PORT)]}]
    targets = [parts]
    other_cells = [{"podSelector": {"matchLabels": {SERVICE_LABEL: cell.service}}} for cell in service.spec.cells]
    if service.shared:
        targets.append({"podSelector": {"matchExpressions": [{"key": SERVICE_LABEL, "operator": "Exists"}]}})
    return [
        _policy(
            service,
            part,
            rules,
            _egress(service, part, [*targets, *(other_cells if part == "gateway" else [])], other_ports),
        )
        for part, rules in reach.items()
    ]


def _egress(service: Served, part: str, targets: list[Manifest], ports: Iterable[int]) -> list[Manifest]:
    """Where the pods of a part may go: to each other, and where the spec sends them."""
    if part == "redis":
        return []
    spec = service.spec
    rules: list[Manifest] = [{"to": targets}, {"ports": [_port(port, kind) for port in DNS for kind in ("UDP", "TCP")]}]
    reached = [*ports]
    if spec.redis.external is not None:
        reached += redis_ports(spec.redis.external)
    if part == "gateway":
        reached += [port for cell in spec.cells if cell.redis is not None for port in redis_ports(cell.redis)]
    if spec.observability.otlp_traces_endpoint is not None:
        collector = urlsplit(spec.observability.otlp_traces_endpoint)
        reached.append(collector.port or (HTTPS if collector.scheme == "https" else HTTP))
    adapters = part == "worker" and any(one.source.hugging_face is not None for one in spec.adapters)
    if spec.model.hugging_face is not None or adapters:
        reached.append(HTTPS)
    if reached:
        rules.append({"ports": [_port(port) for port in dict.fromkeys(reached)]})
    return rules + [_allowed(one) for one in spec.security.egress]


def _allowed(rule: EgressRule) -> Manifest:
    built: Manifest = {}
    if rule.cidr is not None:
        built["to"] = [{"ipBlock": {"cidr": rule.cidr}}]
    if rule.ports:
        built["ports"] = [_port(port) for port in rule.ports]
    return built


def _policy(service: Served, part: str, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    labels = service.labels(part)
    spec = {
        "podSelector": {"matchLabels": selector_of(labels)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{service.name}-{part}", "namespace": service.namespace, "labels": labels},
        # A list without rules allows nothing; API servers do not keep it.
        "spec": {key: value for key, value in spec.items() if value != []},
    }


def _port(number: int, protocol: str = "TCP") -> Manifest:
    return {"protocol": protocol, "port": number}


API_VERSION = "monitoring.coreos.com/v1"

PORTS = {"gateway": "admin", "worker": "health"}
"""Where `/metrics` is, by component: names of container ports."""


def pod_monitors(service: Served) -> list[Manifest]:
    """None unless they are wanted."""
    if not service.spec.observability.service_monitor:
        return []
    components = [name for name, there in (("gateway", service.has_gateways), ("worker", not service.shared)) if there]
    return [_monitor(service, component, PORTS[component]) for component in components]


def _monitor(service: Served, component: str, port: str) -> Manifest:
    labels = service.labels(component)
    return {
        "apiVersion": API_VERSION,
        "kind": "PodMonitor",
        "metadata": {"name": f"{service.name}-{component}", "namespace": service.namespace, "labels": labels},
        "spec": {
            "selector": {"matchLabels": selector_of(labels)},
            "podTargetLabels": [GATEWAY_LABEL] if service.shared else [SERVICE_LABEL, ROLE_LABEL, REVISION_LABEL],
            "podMetricsEndpoints": [{"port": port, "path": "/metrics"}],
        },
    }
