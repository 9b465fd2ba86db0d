"""What protects the pods of a ModelService: disruption budgets and network policies."""

from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.gateway import ADMIN_PORT, PORT, gateway_labels
from tandem_operator.builders.inference_pool import GRPC_PORT
from tandem_operator.builders.inference_pool import PORT as ROUTER_PORT
from tandem_operator.builders.naming import SERVICE_LABEL, Labels, labels_of, selector_of
from tandem_operator.builders.redis_access import PORT as REDIS_PORT
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import HEALTH_PORT
from tandem_operator.builders.worker_group import FOLLOWER
from tandem_operator.settings import OperatorSettings

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that every namespace has since Kubernetes 1.21."""


def disruption_budgets(service: Served, settings: OperatorSettings) -> list[Manifest]:
    """One per role over all revisions, and one for gateways: a node drain takes one pod of each at a time."""
    parts: list[tuple[str, Labels]] = [(role, labels_of(service.name, "worker", role=role)) for role in ROLES]
    if service.spec.gateway.replicas > 1:
        parts.append(("gateway", gateway_labels(service.name)))
    # A group is gone when any of its pods is.
    parts += [(f"{role}-followers", labels_of(service.name, FOLLOWER, role=role)) for role in _grouped(service)]
    return [_budget(service, part, labels, settings.apis.pod_disruption_budget) for part, labels in parts]


def _grouped(service: Served) -> list[RoleName]:
    """Roles whose workers have several pods."""
    return [role for role in ROLES if service.nodes(role) > 1]


def _budget(service: Served, part: str, labels: Labels, api: str) -> Manifest:
    return {
        "apiVersion": api,
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{service.name}-{part}", "namespace": service.namespace, "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector_of(labels)}},
    }


def network_policies(service: Served, settings: OperatorSettings) -> list[Manifest]:
    """Nobody reaches these pods but who has to: clients the gateway, gateways and workers each other and Redis."""
    name, security = service.name, service.spec.security
    if not security.network_policies:
        return []
    parts: Manifest = {"podSelector": {"matchLabels": {SERVICE_LABEL: name}}}
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
    reach = {
        "gateway": [
            clients,
            {"from": [operator], "ports": [_port(PORT)]},
            {"from": [operator, *prometheus], "ports": [_port(ADMIN_PORT)]},
        ],
        # Engines and NIXL choose their ports freely; the sockets are closed to who has not the service's keys.
        "worker": [{"from": [parts]}, {"from": [operator, *prometheus], "ports": [_port(HEALTH_PORT)]}],
    }
    if _grouped(service):
        # Of their tensors only the way in is secret: nobody else comes near.
        reach[FOLLOWER] = reach["worker"]
    if service.spec.gateway.inference_pool is not None:
        # Data planes of Inference Gateways may run in any namespace, and the protocol knows no token.
        reach["router"] = [{"ports": [_port(GRPC_PORT)]}]
        if prometheus:
            reach["router"].append({"from": prometheus, "ports": [_port(ROUTER_PORT)]})
    if service.spec.redis.managed is not None:
        reach["redis"] = [{"from": [parts], "ports": [_port(REDIS_PORT)]}]
    return [_policy(service, part, rules) for part, rules in reach.items()]


def _policy(service: Served, part: str, ingress: list[Manifest]) -> Manifest:
    labels = labels_of(service.name, part)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{service.name}-{part}", "namespace": service.namespace, "labels": labels},
        "spec": {
            "podSelector": {"matchLabels": selector_of(labels)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _port(number: int) -> Manifest:
    return {"protocol": "TCP", "port": number}
