"""Both charts at a real API server, by Helm itself: installed, upgraded and taken away.

Nodes are without containers: pods of the operator become ready, and nothing runs in them.
"""

import pytest
import yaml

from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane
from tandem_testing.helm_library import CHARTS, NEEDS_HELM, HelmError
from tandem_testing.helm_releases import Release
from tandem_testing.waiting import wait_equal

pytestmark = [*KUBE, NEEDS_HELM]

MODEL = {"model": {"path": "/opt/tandem/models/tandem-mini"}}


def found(cluster: ControlPlane, path: str) -> bool:
    return cluster.api.get(path).status_code == 200


def deployment_of(release: str, namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{release}-tandem-operator"


def role_of(release: str, namespace: str) -> str:
    return f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{release}-tandem-operator"


def test_operators_pods_become_available_and_go_again(helm, control_plane, namespace):
    release = Release(helm, control_plane, namespace, namespace, "tandem")
    release.install()
    deployment = deployment_of(namespace, namespace)
    wait_equal(lambda: control_plane.get(deployment)["status"].get("availableReplicas"), 2, PATIENCE_S)
    budgets = control_plane.newest("policy/v1", "policy/v1beta1")
    assert found(
        control_plane, f"/apis/{budgets}/namespaces/{namespace}/poddisruptionbudgets/{namespace}-tandem-operator"
    )
    release.uninstall()
    wait_equal(lambda: control_plane.api.get(deployment).status_code, 404, PATIENCE_S)
    for path in (
        role_of(namespace, namespace),
        f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{namespace}-tandem-edit",
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{namespace}-tandem",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{namespace}-tandem-operator",
    ):
        assert not found(control_plane, path), path


def test_upgrade_moves_the_roles_with_the_namespaces(control_plane, operator, namespace, second):
    assert found(control_plane, role_of(namespace, namespace))
    operator.upgrade({"namespaces": [second], "replicas": 3})
    assert not found(control_plane, role_of(namespace, namespace))
    assert found(control_plane, role_of(namespace, second))
    wait_equal(
        lambda: control_plane.get(deployment_of(namespace, namespace))["status"].get("availableReplicas"),
        3,
        PATIENCE_S,
    )
    assert operator.revisions() == 2


def test_uninstall_of_operator_keeps_models_and_crds(helm, control_plane, namespace):
    release = Release(helm, control_plane, namespace, namespace, "tandem")
    release.install()
    service = f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/modelservices/chat"
    manifest = {"apiVersion": "tandem.dev/v1beta1", "kind": "ModelService", "spec": MODEL}
    control_plane.apply({**manifest, "metadata": {"name": "chat", "namespace": namespace}}).raise_for_status()
    release.uninstall()
    assert found(control_plane, service)
    release.install()
    release.uninstall()
    assert found(control_plane, service)


def test_definitions_are_applied_again_by_kubectl(control_plane):
    """As docs/install.md has it for upgrades: nothing of Helm's installation is in the way."""
    # The schema by which kubectl of 1.20 checks beforehand has no rules in CEL; the server's has.
    words = ("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", str(CHARTS / "tandem" / "crds"))
    applied = control_plane.kubectl(*words).splitlines()
    names = sorted(line.split(" ")[0].rpartition("/")[2] for line in applied)
    kinds = ("modeladapters", "modelcaches", "modelgateways", "modelservices", "workerpools")
    assert names == [f"{kind}.tandem.dev" for kind in kinds]


def test_model_is_installed_changed_and_taken_away(helm, control_plane, namespace):
    path = f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/modelservices/chat"
    release = Release(helm, control_plane, namespace, "chat", "tandem-model")
    release.install({**MODEL, "engine": {"contextLength": 1_048_576}})
    spec = control_plane.get(path)["spec"]
    assert spec["model"] == MODEL["model"]
    assert spec["engine"]["contextLength"] == 1_048_576
    assert spec["prefill"]["replicas"] == 1, "what values leave out has the default of the resource"
    release.upgrade({**MODEL, "prefill": {"replicas": 3}})
    spec = control_plane.get(path)["spec"]
    assert spec["prefill"]["replicas"] == 3
    assert "contextLength" not in spec.get("engine", {})
    release.uninstall()
    assert not found(control_plane, path)


def test_change_that_is_refused_changes_nothing(helm, control_plane, namespace):
    """By helm where it is a typo, by the API server where fields contradict each other."""
    path = f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/modelservices/chat"
    release = Release(helm, control_plane, namespace, "chat", "tandem-model")
    release.install(MODEL)
    before = control_plane.get(path)["metadata"]["resourceVersion"]
    with pytest.raises(HelmError, match="additional properties 'replica' not allowed"):
        release.upgrade({**MODEL, "decode": {"replica": 2}})
    with pytest.raises(HelmError, match="no worker could decode; set both to 0 to stop serving"):
        release.upgrade({**MODEL, "decode": {"replicas": 0}})
    assert control_plane.get(path)["metadata"]["resourceVersion"] == before
    release.upgrade({**MODEL, "decode": {"replicas": 2}})
    assert control_plane.get(path)["spec"]["decode"]["replicas"] == 2
    release.uninstall()


def test_manifest_for_kubectl_is_taken_as_it_is(control_plane):
    """All of charts/install.yaml but what this cluster has in no version, or in an older one alone."""
    manifests = list(yaml.safe_load_all((CHARTS / "install.yaml").read_text()))
    served = [one for one in manifests if "/" not in one["apiVersion"] or control_plane.serves(one["apiVersion"])]
    assert {one["kind"] for one in manifests} - {one["kind"] for one in served} <= {"PodDisruptionBudget"}
    try:
        for manifest in served:
            control_plane.apply(manifest).raise_for_status()
        account = "/api/v1/namespaces/tandem-system/serviceaccounts/tandem"
        assert found(control_plane, account)
    finally:
        for manifest in reversed(served):
            control_plane.api.delete(control_plane.path(manifest))
