"""What the API server refuses of a plan: the service says so within seconds, and no other part of it has changed.

A ModelService passes parts of pods on as they are (affinity, topology spread), so the API server judges them when the
operator applies the objects: unknown fields with 500, bad values with 422, a quota or a missing right with 403.
"""

from typing import Any

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

PARTS = {
    "prefill": lambda pod: {"prefill": {"pod": pod}},
    "decode": lambda pod: {"decode": {"pod": pod}},
    "gateway": lambda pod: {"gateway": {"pod": pod}},
    "redis": lambda pod: {"redis": {"managed": {"pod": pod}}},
}
TERM = {"labelSelector": {"matchLabels": {"a": "b"}}}
BAD_PODS: dict[str, dict[str, Any]] = {
    "unknown field": {"affinity": {"nonsense": 1}},
    "unknown field below": {"affinity": {"nodeAffinity": {"require": []}}},
    "wrong type": {"affinity": {"podAffinity": "near"}},
    "missing value": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}},
    "bad value": {
        "topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]
    },
    "unknown field in a list": {"topologySpreadConstraints": [{"maxScew": 1}]},
    "class that is not there": {"priorityClassName": "no-such-class"},
}
"""Each is let pass by the schema of a ModelService."""
JUDGED_WITH_PODS = {"class that is not there"}
"""Deployments are accepted with it: their pods are refused, which `PodsFailing` says."""


def generations(services: Services) -> dict[str, int]:
    return {name: one["metadata"]["generation"] for name, one in services.deployments().items()}


def degraded(services: Services) -> dict[str, Any]:
    """The condition `Degraded` of the spec as it is now; empty before it is written."""
    body = services.get()
    if body.get("status", {}).get("observedGeneration") != body["metadata"]["generation"]:
        return {}
    return next(one for one in body["status"]["conditions"] if one["type"] == "Degraded")


def test_rejected_pod_sets_degraded_and_changes_nothing(services, running):
    """An unknown field of an affinity had no condition and no event, and other parts had changed already."""
    services.apply()
    services.wait_ready()
    before = generations(services)
    reported = 0
    for part, spec in PARTS.items():
        for name, pod in BAD_PODS.items():
            if name in JUDGED_WITH_PODS:
                continue
            # Every Deployment would change with it.
            services.apply(observability={"logLevel": "debug"}, drainSeconds=33, **spec(pod))
            wait_equal(lambda: degraded(services).get("reason"), "ApplyRefused", PATIENCE_S, running.log)
            assert f"-{part}" in degraded(services)["message"], (part, name)
            assert generations(services) == before, (part, name)
            assert services.condition("Ready")[0] == "True", "what runs goes on"
            reported += 1
            wait_for(
                lambda least=reported: services.events().count(("Warning", "ApplyRefused")) >= least,
                PATIENCE_S,
                lambda: str(services.events()),
            )
    services.apply()
    services.wait_condition("Degraded", "False", "AllWell")


@pytest.mark.parametrize("name", ["unknown field", "bad value"])
def test_new_service_with_a_bad_pod_makes_nothing(services, running, name):
    services.apply(decode={"pod": BAD_PODS[name]})
    services.wait_condition("Ready", "False", "ApplyRefused")
    services.wait_event("Warning", "ApplyRefused")
    assert services.owned() == {}
    assert services.condition("Degraded") == ("True", "ApplyRefused")
    services.apply()
    services.wait_ready()


def test_pod_that_admission_refuses_is_named(services, running):
    services.apply(gateway={"pod": BAD_PODS["class that is not there"]})
    services.wait_condition("Degraded", "True", "PodsFailing")
    services.wait_event("Warning", "PodsFailing")


def test_missing_right_sets_degraded_condition(services, running, operator_account):
    """Reconciliation failed with 403, which only the operator's log reported."""
    services.apply()
    services.wait_ready()
    rules = operator_account.rules()
    kept = [rule for rule in rules if "services" not in rule["resources"]]
    operator_account.admit(services.namespace, kept)
    listed = f"/api/v1/namespaces/{services.namespace}/services"
    with operator_account.client() as client:
        wait_equal(lambda: client.get(listed).status_code, 403, PATIENCE_S)
    services.apply(gateway={"service": {"port": 81}})
    services.wait_condition("Degraded", "True", "ApplyRefused")
    assert 'cannot patch resource "services"' in degraded(services)["message"]
    services.wait_event("Warning", "ApplyRefused")
    operator_account.admit(services.namespace)
    services.wait_condition("Degraded", "False", "AllWell")


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.gateway.httpRoute", {"gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}}}),
        ("spec.gateway.inferencePool", {"gateway": {"inferencePool": {}}}),
        ("spec.observability.serviceMonitor", {"observability": {"serviceMonitor": True}}),
    ],
)
def test_missing_api_is_named(services, operator_kubeconfig, tmp_path, field, spec):
    """The service was reported Ready without the object that its spec asks for."""
    flags = ("--namespaces", services.namespace, "--no-leader-elect", "--allow", "routes,monitors")
    with operator(operator_kubeconfig, tmp_path / "operator.log", *flags):
        services.apply(**spec)
        services.wait_condition("Ready", "False", "InvalidSpec")
        message = next(one["message"] for one in services.get()["status"]["conditions"] if one["type"] == "Valid")
        assert f"{field}: needs " in message
        assert "which this cluster does not serve; install it" in message
        assert services.deployments() == {}
