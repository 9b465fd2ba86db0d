"""What the operator makes of a spec, on a real API server: accepted, applied again without a write, and alive."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.builders.served import served
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane
from tandem_testing.kube_objects import lost
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def plan_of(cluster: ControlPlane, namespace: str, path: Path) -> list[dict[str, Any]]:
    """Manifests for an example, with the APIs that this cluster has."""
    example = yaml.safe_load(path.read_text())
    if "image" in example["spec"]["model"]:
        # Image volumes came with 1.31: an older API server drops them, and refuses a volume without a source.
        example["spec"]["model"] = {"claim": {"claimName": "models"}}
    if "cacheRef" in example["spec"]["model"]:
        # There is no cache with a commit; its pods mount a claim.
        example["spec"]["model"] = {"claim": {"claimName": "models"}}
    if "adapters" in example["spec"]:
        example["spec"]["adapters"] = [one for one in example["spec"]["adapters"] if "image" not in one["source"]]
    # Their APIs are not there either, and a plan without them is refused.
    example["spec"].get("gateway", {}).pop("httpRoute", None)
    example["spec"].get("gateway", {}).pop("inferencePool", None)
    example["spec"].get("observability", {}).pop("serviceMonitor", None)
    apis = ClusterApis(pod_disruption_budget=cluster.newest("policy/v1", "policy/v1beta1"), leader_worker_sets=True)
    settings = OperatorSettings(apis=apis, allow=frozenset(PRIVILEGES))
    service = served(
        example["metadata"]["name"], namespace, msgspec.convert(example["spec"], ModelServiceSpec), settings
    )
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    assert plan.apply, plan.status.conditions
    return [one for one in plan.apply if one["kind"] != "LeaderWorkerSet"]


def named(manifests: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_manifest_is_accepted_and_nothing_of_it_is_dropped(control_plane, namespace, path):
    for manifest in plan_of(control_plane, namespace, path):
        answer = control_plane.apply(manifest, manager="tandem-operator", dryRun="All")
        assert answer.status_code == 201, f"{manifest['kind']} {manifest['metadata']['name']}: {answer.text}"
        assert lost(manifest, answer.json()) == [], manifest["metadata"]["name"]


def test_applying_again_writes_nothing(control_plane, namespace):
    """Else each reconcile would change objects, whose events would start the next reconcile."""
    manifests = plan_of(control_plane, namespace, EXAMPLES[0].with_name("minimal.yaml"))
    for manifest in manifests:
        control_plane.apply(manifest, manager="tandem-operator").raise_for_status()
        # Controllers write too: what counts is whether this request did.
        for _ in range(10):
            before = control_plane.get(control_plane.path(manifest))["metadata"]
            again = control_plane.apply(manifest, manager="tandem-operator").raise_for_status().json()["metadata"]
            if again["resourceVersion"] == before["resourceVersion"]:
                break
        assert again["resourceVersion"] == before["resourceVersion"], manifest["kind"]
        assert again["generation"] == before["generation"] if "generation" in before else True


def claimed(name: str, namespace: str, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume, and the claim that it is for."""
    size = {"storage": "1Gi"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{name}-{namespace}"},
            "spec": {
                "capacity": size,
                "accessModes": [mode],
                "claimRef": {**claim, "namespace": namespace, "name": name},
                "hostPath": {"path": "/nowhere"},
            },
        },
        {
            **claim,
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "accessModes": [mode],
                "storageClassName": "",
                "volumeName": f"{name}-{namespace}",
                "resources": {"requests": size},
            },
        },
    )


@pytest.fixture
def provided(control_plane: ControlPlane, namespace: str) -> None:
    """What examples name and others provide: classes and labels by the administrator, claims by their owner."""
    models, kernels = claimed("models", namespace, "ReadOnlyMany"), claimed("kernels", namespace, "ReadWriteMany")
    made: tuple[dict[str, Any], ...] = (
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "serving"},
            "value": 1000,
            "description": "for examples",
        },
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"},
        *models,
        *kernels,
    )
    for manifest in made:
        control_plane.apply(manifest).raise_for_status()
    control_plane.merge("/api/v1/nodes/fake-0", {"metadata": {"labels": {"gpu": "h200"}}}).raise_for_status()
    for _, claim in (models, kernels):
        path = control_plane.path(claim)
        # A pod that comes before its volume is bound is scheduled again, but later.
        wait_equal(lambda path=path: control_plane.get(path).get("status", {}).get("phase"), "Bound", PATIENCE_S)


@pytest.mark.usefixtures("provided")
@pytest.mark.parametrize("name", ["minimal", "full"])
def test_deployments_get_available_and_services_find_their_pods(control_plane, namespace, name):
    manifests = plan_of(control_plane, namespace, EXAMPLES[0].with_name(f"{name}.yaml"))
    for manifest in manifests:
        control_plane.apply(manifest, manager="tandem-operator").raise_for_status()
    for deployment in named(manifests, "Deployment").values():
        path, wanted = control_plane.path(deployment), deployment["spec"]["replicas"]
        wait_equal(
            lambda path=path: control_plane.get(path)["status"].get("readyReplicas"),
            wanted,
            PATIENCE_S,
            lambda path=path: str(control_plane.get(path)["status"]),
        )
    for service in named(manifests, "Service").values():
        path = control_plane.path({**service, "kind": "Endpoints"})
        wait_for(
            lambda path=path: bool(control_plane.get(path).get("subsets")),
            PATIENCE_S,
            lambda path=path: str(control_plane.get(path)),
        )
    for budget in named(manifests, "PodDisruptionBudget").values():
        path = control_plane.path(budget)
        pods = len(matching(control_plane, namespace, budget["spec"]["selector"]["matchLabels"]))
        wait_equal(
            lambda path=path: control_plane.get(path).get("status", {}).get("expectedPods"),
            pods,
            PATIENCE_S,
            lambda path=path: str(control_plane.get(path)),
        )


@pytest.mark.usefixtures("provided")
def test_eviction_waits_while_a_role_has_lost_a_worker(control_plane, namespace):
    """A drain of nodes takes one worker of each role at a time."""
    manifests = plan_of(control_plane, namespace, EXAMPLES[0].with_name("gpu.yaml"))
    for manifest in manifests:
        control_plane.apply(manifest, manager="tandem-operator").raise_for_status()
    (budget,) = [one for name, one in named(manifests, "PodDisruptionBudget").items() if "-decode-" in name]

    def allowed() -> int:
        status = control_plane.get(control_plane.path(budget)).get("status", {})
        return status.get("disruptionsAllowed", 0) if status.get("expectedPods") == 2 else -1

    wait_equal(allowed, 1, PATIENCE_S)
    staying, leaving = matching(control_plane, namespace, budget["spec"]["selector"]["matchLabels"])
    set_ready(control_plane, staying, ready=False)
    wait_equal(allowed, 0, PATIENCE_S)
    assert evict(control_plane, budget, leaving).status_code == 429
    set_ready(control_plane, staying, ready=True)
    wait_equal(allowed, 1, PATIENCE_S)
    assert evict(control_plane, budget, leaving).status_code == 201


def matching(cluster: ControlPlane, namespace: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    listed = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods", params={"labelSelector": selector})
    pods: list[dict[str, Any]] = listed.raise_for_status().json()["items"]
    return pods


def set_ready(cluster: ControlPlane, pod: dict[str, Any], *, ready: bool) -> None:
    annotations = {"fake-kubelet/ready": None if ready else "false"}
    cluster.merge(pod_path(pod), {"metadata": {"annotations": annotations}}).raise_for_status()


def evict(cluster: ControlPlane, budget: dict[str, Any], pod: dict[str, Any]) -> httpx.Response:
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace")}
    eviction = {"apiVersion": budget["apiVersion"], "kind": "Eviction", "metadata": metadata}
    return cluster.api.post(f"{pod_path(pod)}/eviction", json=eviction)


def pod_path(pod: dict[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def test_privileges_that_are_taken_back_are_gone(control_plane, namespace, tmp_path):
    """Else a pod would keep what its resource may no longer ask for: fields that the API server has filled in."""
    path = EXAMPLES[0].with_name("node-local.yaml")
    example = yaml.safe_load(path.read_text())
    for part in ("prefill", "decode", "gateway"):
        del example["spec"][part]["pod"]
    plain_path = tmp_path / "plain.yaml"
    plain_path.write_text(yaml.safe_dump(example))
    plain = named(plan_of(control_plane, namespace, plain_path), "Deployment")
    for name, raised in named(plan_of(control_plane, namespace, path), "Deployment").items():
        fresh = control_plane.apply(plain[name], manager="tandem-operator", dryRun="All").raise_for_status().json()
        control_plane.apply(raised, manager="tandem-operator").raise_for_status()
        after = control_plane.apply(plain[name], manager="tandem-operator").raise_for_status().json()
        assert after["spec"]["template"] == fresh["spec"]["template"], name
