"""The custom resources as a cluster has them: installed, explained, listed, scaled."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tandem_operator.api.crds import crds
from tandem_operator.api.model_service import Decision, ModelServiceStatus
from tandem_testing.control_plane import CRDS, KUBE, PATIENCE_S, TABLE, ControlPlane
from tandem_testing.custom_resources import model_adapter, model_service, worker_pool
from tandem_testing.kube_cluster import KubeCluster, service_of
from tandem_testing.schema_walk import defaults_below, fields_below, schema_of_crd
from tandem_testing.waiting import wait_for

pytestmark = KUBE

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SERVICE, POOL, GATEWAY, ADAPTER, CACHE = crds()
KINDS = pytest.mark.parametrize(
    "crd", [SERVICE, POOL, ADAPTER, CACHE], ids=["ModelService", "WorkerPool", "ModelAdapter", "ModelCache"]
)


def applied(cluster: ControlPlane, manifest: dict[str, Any]) -> dict[str, Any]:
    return cluster.apply(manifest).raise_for_status().json()


@KINDS
def test_crds_are_established_with_structural_schema(control_plane, crd):
    status = control_plane.get(f"{CRDS}/{crd['metadata']['name']}")["status"]
    conditions = {one["type"]: (one["status"], one["message"]) for one in status["conditions"]}
    assert conditions["Established"][0] == "True", conditions
    assert conditions["NamesAccepted"][0] == "True", conditions
    assert conditions.get("NonStructuralSchema", ("False",))[0] == "False", conditions


@pytest.mark.parametrize("dry_run", [{"dryRun": "All"}, {}], ids=["dry run", "applied"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted_as_they_stand(control_plane, namespace, path, dry_run):
    manifest = yaml.safe_load(path.read_text())
    manifest["metadata"]["namespace"] = namespace
    answer = control_plane.apply(manifest, fieldValidation="Strict", **dry_run)
    assert answer.status_code == 201, answer.text
    assert "warning" not in answer.headers, answer.headers["warning"]


def test_defaults_are_filled_in(control_plane, namespace):
    """Every default of the schema stands in the object, down to the parts that were not mentioned."""
    spec = applied(control_plane, model_service(namespace))["spec"]
    assert spec == {"model": {"path": "/models/mini"}, **defaults_below(schema_of_crd(SERVICE)["properties"]["spec"])}
    assert applied(control_plane, worker_pool(namespace))["spec"]["replicas"] == 1


def test_no_status_is_made_up_by_defaults(control_plane, namespace):
    assert "status" not in applied(control_plane, model_service(namespace))
    assert "status" not in applied(control_plane, worker_pool(namespace))


@pytest.mark.parametrize("make", [model_service, worker_pool, model_adapter])
def test_status_is_a_subresource(control_plane, namespace, make):
    manifest = make(namespace)
    before = applied(control_plane, manifest)
    path = control_plane.path(manifest)
    condition = {"type": "Ready", "status": "False", "reason": "Starting", "message": "wait"}
    written = control_plane.merge(f"{path}/status", {"status": {"observedGeneration": 1, "conditions": [condition]}})
    assert written.raise_for_status().json()["metadata"]["generation"] == before["metadata"]["generation"] == 1
    kept = control_plane.merge(path, {"status": {"observedGeneration": 7}}).raise_for_status().json()
    assert kept["status"]["observedGeneration"] == 1
    unchanged = control_plane.merge(f"{path}/status", {"spec": {"drainSeconds": 1, "replicas": 9}})
    assert unchanged.raise_for_status().json()["spec"] == before["spec"]


def test_status_is_kept_as_the_planner_wrote_it(control_plane, namespace):
    """Nothing of it is pruned, refused or changed, neither while starting nor when all is well.

    Compared as it is decoded: the API server fills in defaults within lists, which encoding leaves out.
    """
    manifest, mind = model_service(namespace), KubeCluster()
    control_plane.apply(manifest).raise_for_status()
    wanted = service_of(manifest["spec"])
    mind.reconcile(wanted)
    starting = mind.status
    mind.settle(wanted)
    decision = Decision(time="2026-01-01T00:00:00Z", role="decode", action="scale", before=1, after=3, reason="12 wait")
    serving = msgspec.structs.replace(mind.status, decisions=[decision], history=["abc"])
    path = control_plane.path(manifest, "status")
    for status in (starting, serving):
        control_plane.merge(path, {"status": msgspec.to_builtins(status)}).raise_for_status()
        assert msgspec.convert(control_plane.get(path)["status"], ModelServiceStatus) == status


def test_conditions_of_two_managers_are_merged_by_type(control_plane, namespace):
    manifest = model_service(namespace)
    applied(control_plane, manifest)
    for manager in ("Ready", "Degraded"):
        condition = {"type": manager, "status": "True", "reason": "Because"}
        body = {
            **{key: manifest[key] for key in ("apiVersion", "kind", "metadata")},
            "status": {"conditions": [condition]},
        }
        answer = control_plane.api.patch(
            control_plane.path(manifest, "status"),
            content=json.dumps(body),
            headers={"Content-Type": "application/apply-patch+yaml"},
            params={"fieldManager": manager},
        )
        answer.raise_for_status()
    conditions = control_plane.get(control_plane.path(manifest))["status"]["conditions"]
    assert {one["type"] for one in conditions} == {"Ready", "Degraded"}


def test_field_manager_conflict_returns_409(control_plane, namespace):
    applied(control_plane, model_service(namespace, drainSeconds=30))
    answer = control_plane.apply(model_service(namespace, drainSeconds=60), manager="other")
    assert answer.status_code == 409
    assert ".spec.drainSeconds" in answer.json()["message"]


@KINDS
def test_resource_table_has_the_declared_columns(control_plane, namespace, crd):
    names = crd["spec"]["names"]
    path = f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/{names['plural']}"
    table = control_plane.api.get(path, headers={"Accept": TABLE}).raise_for_status().json()
    ours = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [one["name"] for one in table["columnDefinitions"]] == ["Name", *(one["name"] for one in ours)]


def test_kubectl_get_columns_show_the_status(control_plane, namespace):
    manifest = model_service(namespace)
    applied(control_plane, manifest)
    conditions = [{"type": "Ready", "status": "False", "reason": "WorkersStarting", "message": "wait"}]
    status = {
        "ready": "0/1P 1/1D",
        "serving": "abc122",
        "revision": "abc123",
        "error": "CanaryFailed: no answer",
        "endpoint": "http://chat",
        "conditions": conditions,
    }
    control_plane.merge(control_plane.path(manifest, "status"), {"status": status}).raise_for_status()
    head, row = control_plane.kubectl("-n", namespace, "get", "ms").splitlines()
    assert head.split() == ["NAME", "READY", "WORKERS", "SERVING", "WANTED", "REASON", "ERROR", "AGE"]
    shown = ["chat", "False", "0/1P", "1/1D", "abc122", "abc123", "WorkersStarting"]
    assert row.split()[:-1] == [*shown, "CanaryFailed:", "no", "answer"]
    assert "http://chat" in control_plane.kubectl("-n", namespace, "get", "ms", "-o", "wide")


@KINDS
def test_names_short_names_and_categories(control_plane, crd):
    resources = control_plane.get("/apis/tandem.dev/v1beta1")["resources"]
    names = crd["spec"]["names"]
    (found,) = [one for one in resources if one["name"] == names["plural"]]
    assert found["shortNames"] == names["shortNames"]
    assert set(found["categories"]) == {"all", "tandem"}
    assert found["singularName"] == names["singular"]
    assert found["namespaced"] is True


def test_one_word_lists_everything_of_ours(control_plane, namespace):
    applied(control_plane, model_service(namespace))
    applied(control_plane, worker_pool(namespace))
    listed = control_plane.kubectl("-n", namespace, "get", "tandem", "-o", "name").split()
    assert sorted(listed) == ["modelservice.tandem.dev/chat", "workerpool.tandem.dev/chat-decode"]


@KINDS
def test_kubectl_explains_every_field(control_plane, crd):
    """From the document that kubectl reads: kubectl itself shows one level at a time."""
    published = definition_of(control_plane, crd["spec"]["names"]["kind"])
    texts = {path: one.get("description", "") for path, one in fields_below(published)}
    ours = {path: one.get("description", "") for path, one in fields_below(schema_of_crd(crd))}
    assert {path: texts.get(path) for path in ours if ours[path]} == {path: text for path, text in ours.items() if text}
    assert [path for path, text in texts.items() if not text] == []


def test_kubectl_explain_shows_field_documentation(control_plane):
    definition_of(control_plane, "ModelService")
    output = control_plane.kubectl("explain", "modelservice.spec.transfer.expect")
    assert "Slowest expected transport; a slower one" in output
    everything = control_plane.kubectl("explain", "ms", "--recursive")
    assert "numDraftTokens" in everything


def definition_of(cluster: ControlPlane, kind: str) -> dict[str, Any]:
    """As published. Release 1.20 collects documents when a group is new, and then once a minute."""
    name = f"dev.tandem.v1beta1.{kind}"
    published = "/openapi/v2"
    wait_for(lambda: f'"{name}"' in cluster.api.get(published).text, 2 * PATIENCE_S, lambda: f"{name} is not published")
    definition: dict[str, Any] = cluster.get(published)["definitions"][name]
    return definition
