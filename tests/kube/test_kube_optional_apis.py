"""Objects of APIs that a cluster may lack, where it has them: HTTPRoutes, InferencePools, PodMonitors.

Their definitions are those of tools/neighbours/crds: the API server drops fields that these lack.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane, neighbour_apis
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import contains
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal

pytestmark = KUBE

KINDS = {
    "HTTPRoute": ("gateway.networking.k8s.io", "httproutes"),
    "InferencePool": ("inference.networking.k8s.io", "inferencepools"),
    "PodMonitor": ("monitoring.coreos.com", "podmonitors"),
}
WANTED = {
    "gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}, "inferencePool": {}},
    "observability": {"serviceMonitor": True},
}


def built() -> dict[tuple[str, str], dict[str, Any]]:
    """Specs of these kinds as the operator's builders write them."""
    service = service_of({"model": {"path": "/opt/tandem/models/tandem-mini"}, **WANTED})
    apis = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True)
    settings = OperatorSettings(apis=apis, allow=frozenset({"routes", "monitors"}))
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    return {(one["kind"], one["metadata"]["name"]): one["spec"] for one in plan.apply if one["kind"] in KINDS}


@pytest.fixture
def apis(control_plane: ControlPlane) -> Iterator[None]:
    with neighbour_apis(control_plane, *KINDS):
        yield


def objects(services: Services) -> dict[str, set[str]]:
    found = {}
    for kind, (group, plural) in KINDS.items():
        items = services.cluster.get(f"/apis/{group}/v1/namespaces/{services.namespace}/{plural}")["items"]
        found[kind] = {one["metadata"]["name"] for one in items}
    return found


@pytest.mark.usefixtures("apis")
def test_routes_pools_and_monitors_come_and_go(control_plane, namespace, operator_kubeconfig, tmp_path):
    """With the rights of the chart alone, and only while the administrator allows them."""
    services = Services(control_plane, namespace)
    flags = ("--namespaces", namespace, "--no-leader-elect")
    with operator(operator_kubeconfig, tmp_path / "denied.log", *flags):
        services.apply(**WANTED)
        services.wait_condition("Ready", "False", "InvalidSpec")
        assert not any(objects(services).values())
        assert services.deployments() == {}
    with operator(operator_kubeconfig, tmp_path / "allowed.log", *flags, "--allow", "routes,monitors") as running:
        services.wait_ready()
        assert objects(services) == {
            "HTTPRoute": {"chat-gateway"},
            "InferencePool": {"chat"},
            "PodMonitor": {"chat-gateway", "chat-worker"},
        }
        for (kind, name), spec in built().items():
            group, plural = KINDS[kind]
            stored = control_plane.get(f"/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}")["spec"]
            assert contains(stored, spec), f"the API server dropped a part of {kind} {name}: {stored}"
        services.apply()
        wait_equal(lambda: objects(services), {kind: set() for kind in KINDS}, PATIENCE_S, running.log)
        services.wait_ready()
