"""Access to the pods of a ModelService, port by port."""

from typing import Any

from tandem_operator.builders.policies import network_policies
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import service_of

SOLE_TENANT = ["everybody"]
PARTS = {"podSelector": {"matchLabels": {"tandem.dev/service": "chat"}}}
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "llm"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
}


def reach(**spec: Any) -> dict[str, list[tuple[list[int], Any]]]:
    """Ports (none: all) and peers, by part."""
    policies = network_policies(service_of(**spec), OperatorSettings(operator_namespace="llm"))
    return {
        one["metadata"]["name"]: [
            ([port["port"] for port in rule.get("ports", [])], rule.get("from", SOLE_TENANT))
            for rule in one["spec"]["ingress"]
        ]
        for one in policies
    }


def test_clients_reach_the_gateway_alone():
    assert reach()["chat-gateway"] == [([8000], SOLE_TENANT), ([8000], [OPERATOR]), ([8001], [OPERATOR])]
    open_parts = [part for part, rules in reach().items() for _, peer in rules if peer == SOLE_TENANT]
    assert open_parts == ["chat-gateway"]


def test_client_namespaces_narrow_it():
    chosen = {"namespaceSelector": {"matchLabels": {"team": "search"}}}
    assert reach(security={"clientNamespaces": {"team": "search"}})["chat-gateway"][0] == ([8000], [chosen, PARTS])


def test_policy_admits_own_service_and_operator_to_workers():
    assert reach()["chat-worker"] == [([], [PARTS]), ([9090], [OPERATOR])]


def test_prometheus_reads_metrics_where_its_namespaces_are_named():
    prometheus = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    rules = reach(observability={"metricsNamespaces": {"name": "monitoring"}})
    assert [(ports, part) for part, those in rules.items() for ports, peer in those if prometheus in peer] == [
        ([8001], "chat-gateway"),
        ([9090], "chat-worker"),
    ]


def test_redis_is_reached_by_its_service_alone():
    """Not by the operator either: it reads load from the workers themselves."""
    assert reach()["chat-redis"] == [([6379], [PARTS])]


def test_switched_off_there_are_none():
    assert reach(security={"networkPolicies": False}) == {}
