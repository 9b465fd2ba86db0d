"""v1alpha1 and v1beta1 of the custom resources: objects of both are the same, and stored ones are rewritten."""

import copy
from typing import Any

import pytest

from tandem_operator.api.crds import crds
from tandem_operator.api.model_service import FORMER_VERSIONS, GROUP, VERSION
from tandem_testing.control_plane import CRDS, KUBE, PATIENCE_S, ControlPlane
from tandem_testing.custom_resources import model_adapter, model_service, worker_pool
from tandem_testing.waiting import wait_for

pytestmark = KUBE
Manifest = dict[str, Any]
SERVICE = crds()[0]


def of_version(manifest: Manifest, version: str, group: str = GROUP) -> Manifest:
    return {**manifest, "apiVersion": f"{group}/{version}"}


@pytest.mark.parametrize("former", FORMER_VERSIONS)
@pytest.mark.parametrize("make", [model_service, worker_pool, model_adapter])
def test_object_of_a_former_version_is_the_same_in_the_newest(control_plane, namespace, make, former):
    manifest = of_version(make(namespace), former)
    answer = control_plane.apply(manifest, fieldValidation="Strict")
    assert (answer.status_code, "warning" in answer.headers) == (201, False), answer.text
    old = control_plane.get(control_plane.path(manifest))
    new = control_plane.get(control_plane.path(of_version(manifest, VERSION)))
    assert (old["apiVersion"], new["apiVersion"]) == (f"{GROUP}/{former}", f"{GROUP}/{VERSION}")
    assert old["spec"] == new["spec"]
    assert old["metadata"]["uid"] == new["metadata"]["uid"]
    # The same owner may continue with the newest version, and take a field away that it has set.
    again = control_plane.apply(of_version(make(namespace), VERSION)).raise_for_status()
    assert again.json()["metadata"]["generation"] == 1
    back = control_plane.apply(manifest).raise_for_status()
    assert back.json()["metadata"]["generation"] == 1


def test_newest_version_alone_is_stored(control_plane):
    for crd in crds():
        status = control_plane.get(f"{CRDS}/{crd['metadata']['name']}")["status"]
        assert status["storedVersions"] == [VERSION]


@pytest.fixture
def upgraded(control_plane: ControlPlane, namespace: str):
    """A definition of another group, as of the release before v1beta1, with one object."""
    group = "upgrade.tandem.example"
    crd = copy.deepcopy(SERVICE)
    crd["metadata"]["name"] = f"modelservices.{group}"
    crd["spec"]["group"] = group
    del crd["spec"]["names"]["shortNames"], crd["spec"]["names"]["categories"]
    before = copy.deepcopy(crd)
    before["spec"].pop("conversion")
    before["spec"]["versions"] = [
        {**one, "storage": True} for one in before["spec"]["versions"] if one["name"] == "v1alpha1"
    ]
    control_plane.apply(before).raise_for_status()
    manifest = of_version(model_service(namespace, drainSeconds=30), "v1alpha1", group)
    root = f"/apis/{group}"
    served = f"{root}/v1alpha1/namespaces/{namespace}/modelservices"
    wait_for(lambda: control_plane.api.get(served).status_code == 200, PATIENCE_S, lambda: "not served")
    control_plane.api.post(served, json=manifest).raise_for_status()
    control_plane.apply(crd).raise_for_status()
    newest = f"{root}/{VERSION}/namespaces/{namespace}/modelservices/chat"
    wait_for(lambda: control_plane.api.get(newest).status_code == 200, PATIENCE_S, lambda: "not served")
    yield crd["metadata"]["name"], served, newest
    path = f"{CRDS}/{crd['metadata']['name']}"
    control_plane.api.delete(path).raise_for_status()
    wait_for(lambda: control_plane.api.get(path).status_code == 404, PATIENCE_S, lambda: "not removed")


def test_stored_objects_are_rewritten_as_documented(control_plane, upgraded):
    """docs/upgrade-rollback.md: read and replace each object, then take the former version from `storedVersions`."""
    name, served, newest = upgraded
    assert sorted(control_plane.get(f"{CRDS}/{name}")["status"]["storedVersions"]) == ["v1alpha1", VERSION]
    body = control_plane.get(newest)
    assert body["spec"]["drainSeconds"] == 30
    control_plane.api.put(newest, json=body).raise_for_status()
    patch = {"status": {"storedVersions": [VERSION]}}
    control_plane.merge(f"{CRDS}/{name}/status", patch).raise_for_status()
    assert control_plane.get(f"{CRDS}/{name}")["status"]["storedVersions"] == [VERSION]
    # The API server serves a changed definition again.
    wait_for(lambda: control_plane.api.get(f"{served}/chat").status_code == 200, PATIENCE_S, lambda: "not served")
    assert control_plane.get(f"{served}/chat")["spec"]["drainSeconds"] == 30


def test_operator_serves_a_service_of_a_former_version(services, running):
    manifest = of_version(model_service(services.namespace), "v1alpha1")
    manifest["spec"]["model"] = {"path": "/opt/tandem/models/tandem-mini"}
    services.cluster.apply(manifest).raise_for_status()
    services.wait_ready()
    assert services.condition("VersionSkew")[0] == "False"
    former = services.cluster.get(services.cluster.path(manifest))
    assert former["status"]["conditions"] == services.get()["status"]["conditions"]
    for (plural, name), one in services.owned().items():
        (owner,) = [ref for ref in one["metadata"]["ownerReferences"] if ref["kind"] == "ModelService"]
        assert owner["apiVersion"] == f"{GROUP}/{VERSION}", (plural, name)
