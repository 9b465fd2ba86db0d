"""The operator under its own account, through the life of a service: all that it asks for is granted, and all that is
granted it asks for.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_operator.planning.deletion import FORMER_FINALIZER
from tandem_testing.account_access import account_token
from tandem_testing.audit import Asked, asked_by
from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane
from tandem_testing.custom_resources import model_adapter
from tandem_testing.helm_library import CHARTS, NEEDS_HELM
from tandem_testing.kube_caches import Caches
from tandem_testing.kube_fronts import FRONT, Front
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import OperatorProcess
from tandem_testing.operator_process import operator as operator_process
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = [*KUBE, NEEDS_HELM]

NOT_ASKED_HERE = {
    # There are neither Gateway API nor Prometheus operator in this cluster, nor LeaderWorkerSets.
    *(
        (resource, verb)
        for resource in (
            "httproutes.gateway.networking.k8s.io",
            "inferencepools.inference.networking.k8s.io",
            "podmonitors.monitoring.coreos.com",
            "leaderworkersets.leaderworkerset.x-k8s.io",
        )
        for verb in "create delete get list patch watch".split()
    ),
    ("leaderworkersets/scale.leaderworkerset.x-k8s.io", "patch"),
    # Of a deleted service whose gateways do not end in time: test_kube_deletion.py.
    ("workerpools.tandem.dev", "delete"),
    # Asked for by the admission plugin OwnerReferencesPermissionEnforcement, not by the operator.
    ("modelservices/finalizers.tandem.dev", "update"),
    ("modelgateways/finalizers.tandem.dev", "update"),
    ("modelcaches/finalizers.tandem.dev", "update"),
}


def granted() -> set[tuple[str, str]]:
    """tests/charts/rights.txt."""
    lines = (CHARTS.parent / "tests" / "charts" / "rights.txt").read_text().splitlines()
    pairs = [line.split(": ") for line in lines]
    return {(resource.split(" ")[0], verb) for resource, verbs in pairs for verb in verbs.split(" ")}


def kubeconfig_of(control_plane: ControlPlane, namespace: str, path: Path) -> Path:
    """With the token of the operator's service account."""
    config = json.loads(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": account_token(control_plane, namespace, f"{namespace}-tandem")}
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(params=["Namespaces", "Cluster"])
def running(request, control_plane, operator, namespace, tmp_path) -> Iterator[OperatorProcess]:
    """The operator as the chart lets it run, one replica outside of the cluster."""
    operator.upgrade({"scope": request.param})
    flags = ["--operator-namespace", namespace, "--lease-name", f"{namespace}-tandem-operator"]
    if request.param == "Namespaces":
        flags += ["--namespaces", namespace]
    kubeconfig = kubeconfig_of(control_plane, namespace, tmp_path / "kubeconfig")
    with operator_process(kubeconfig, tmp_path / "operator.log", *flags) as process:
        yield process


def asked(control_plane: ControlPlane, namespace: str) -> list[Asked]:
    account = f"system:serviceaccount:{namespace}:{namespace}-tandem"
    return asked_by(account, control_plane.kubeconfig.parent)


def verbs_of(request: Asked) -> list[str]:
    """Rights that a request needed. Server-side apply of what is not there yet needs two."""
    return ["patch", "create"] if request.verb == "patch" and request.status == 201 else [request.verb]


def live(services: Services) -> None:
    """Made, rolled to another revision, scaled, made different in what takes objects away, and deleted; next to it a
    ModelAdapter that waits for a claim."""
    services.cluster.apply(model_adapter(services.namespace)).raise_for_status()
    services.apply(gateway={"replicas": 2}, security={"networkPolicies": True})
    # As an operator of a former release has left it.
    services.cluster.merge(services.path(), {"metadata": {"finalizers": [FORMER_FINALIZER]}}).raise_for_status()
    services.wait_ready()
    wait_equal(lambda: services.get()["metadata"].get("finalizers"), None, PATIENCE_S)
    services.apply(gateway={"replicas": 1}, engine={"dtype": "float32"}, prefill={"replicas": 2})
    services.wait_ready()
    services.apply(gateway={"replicas": 1}, engine={"dtype": "float32"}, prefill={"replicas": 1})
    services.wait_ready()
    services.apply(redis={"external": {"url": "redis://elsewhere:6379/0"}}, security={"networkPolicies": False})
    services.wait_ready()
    services.wait_event("Warning", "NotMounted", "sql")
    live_cached(Caches(services.cluster, services.namespace))
    services.delete()
    wait_for(services.gone, PATIENCE_S, services.described)
    live_behind(Front(services.cluster, services.namespace), services)


def live_cached(caches: Caches) -> None:
    """Downloaded, so that its Job goes."""
    caches.apply()
    caches.download("a" * 40, phase="Pending")
    wait_equal(caches.jobs, [], PATIENCE_S)


def live_behind(front: Front, services: Services) -> None:
    """Served by a ModelGateway, until both are deleted."""
    front.apply()
    services.apply("behind", **FRONT)
    services.wait_ready("behind")
    services.delete("behind")
    front.wait_served()
    front.delete()


def test_operator_rights_equal_its_requests(control_plane, namespace, running, request):
    """And outside of the listed namespaces it asks for nothing, beside discovery, which is no resource."""
    live(Services(control_plane, namespace))
    assert running.stop() == 0, running.log()
    requests = asked(control_plane, namespace)
    assert [one for one in requests if one.forbidden] == []
    used = {(one.resource, verb) for one in requests for verb in verbs_of(one)}
    assert used <= granted()
    assert granted() - used == NOT_ASKED_HERE
    assert {one.namespace for one in requests if one.resource == "leases.coordination.k8s.io"} == {namespace}
    if request.node.callspec.params["running"] == "Namespaces":
        assert {one.namespace for one in requests} == {namespace}
    else:
        assert {one.verb for one in requests if one.namespace == ""} == {"list", "watch"}
