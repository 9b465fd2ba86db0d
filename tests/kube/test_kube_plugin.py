"""`kubectl tandem` against a real API server: status, scale, decisions, drain, and what it says when it may not."""

import json
import re

import pytest

from tandem_services.cli.k8s import command
from tandem_testing.control_plane import KUBE, ControlPlane
from tandem_testing.kubernetes_objects import condition, pod
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

PATIENCE_S = 60.0
CREATED = "2026-01-01T10:00:00Z"


@pytest.fixture
def kubectl(control_plane: ControlPlane, namespace: str, capsys):
    """Run a command in the namespace; returns its exit status, output and errors."""

    def run(*words: str, kubeconfig=control_plane.kubeconfig) -> tuple[int, str, str]:
        status = command.main([*words, "--kubeconfig", str(kubeconfig), "-n", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def service(control_plane: ControlPlane, namespace: str):
    """Apply `llama` with this mode of scaling, and pools as the operator would."""

    def apply(mode: str = "none") -> dict:
        manifest = {
            "apiVersion": "tandem.dev/v1beta1",
            "kind": "ModelService",
            "metadata": {"name": "llama", "namespace": namespace},
            "spec": {
                "model": {"path": "/models/llama"},
                "prefill": {"replicas": 1},
                "decode": {"replicas": 2},
                "autoscaling": {"mode": mode},
            },
        }
        control_plane.apply(manifest).raise_for_status()
        for role, replicas in (("prefill", 1), ("decode", 2)):
            pool = {
                "apiVersion": "tandem.dev/v1beta1",
                "kind": "WorkerPool",
                "metadata": {"name": f"llama-{role}", "namespace": namespace},
                "spec": {"serviceName": "llama", "role": role, "replicas": replicas},
            }
            control_plane.apply(pool).raise_for_status()
        return manifest

    return apply


def put_pod(cluster: ControlPlane, namespace: str, name: str, role: str) -> str:
    """A pod that the fake kubelets run; returns its path once it is ready."""
    manifest = pod(name, role=role)
    manifest["metadata"] = {key: manifest["metadata"][key] for key in ("name", "labels")} | {"namespace": namespace}
    containers = [{**one, "image": "none"} for one in manifest["spec"]["containers"]]
    manifest["spec"] = {"containers": containers, "terminationGracePeriodSeconds": 1}
    del manifest["status"]
    cluster.apply(manifest).raise_for_status()
    path = cluster.path(manifest)

    def ready() -> bool:
        conditions = cluster.get(path)["status"].get("conditions", ())
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    wait_for(ready, PATIENCE_S, lambda: json.dumps(cluster.get(path)["status"]))
    return path


def test_kubectl_tandem_status_shows_api_server_objects(control_plane, namespace, service, kubectl):
    manifest = service()
    status = {
        "observedGeneration": 1,
        "endpoint": f"http://llama-gateway.{namespace}:80",
        "conditions": [condition("Ready", "True", "CanaryPassed", generation=1)],
        "revisions": [{"name": "5d8f", "share": 1.0, "prefill": {"desired": 1}, "decode": {"desired": 2}}],
    }
    control_plane.merge(control_plane.path(manifest, "status"), {"status": status}).raise_for_status()
    put_pod(control_plane, namespace, "llama-decode-5d8f-a", "decode")
    code, out, _ = kubectl("status", "llama", "--no-figures")
    assert code == 0
    assert re.search(rf"^llama +Ready  http://llama-gateway.{namespace}:80$", out, re.MULTILINE)
    assert re.search(r"─ llama-decode-5d8f-a +Ready", out)
    [tree] = json.loads(kubectl("status", "--no-figures", "-o", "json")[1])
    assert [role["wanted"] for role in tree["roles"]] == [1, 2]
    # Nothing runs in these pods: that they do not answer is shown, within the time limit.
    assert "no response:" in kubectl("status")[1]
    assert "llama" in kubectl("status", "--no-figures", "-A")[1]


@pytest.mark.parametrize("mode", ["none", "external"])
def test_workers_are_scaled_where_their_number_is_decided(control_plane, namespace, service, kubectl, mode):
    manifest = service(mode)
    assert kubectl("scale", "llama", "--prefill", "2", "--decode", "4")[0] == 0
    spec = control_plane.get(control_plane.path(manifest))["spec"]
    pools = control_plane.get(f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/workerpools")["items"]
    in_pools = {pool["spec"]["role"]: pool["spec"]["replicas"] for pool in pools}
    in_spec = {role: spec[role]["replicas"] for role in ("prefill", "decode")}
    wanted, before = {"prefill": 2, "decode": 4}, {"prefill": 1, "decode": 2}
    assert (in_spec, in_pools) == ((wanted, before) if mode == "none" else (before, wanted))


def test_scale_reports_schema_validation_error(service, kubectl):
    service()
    code, _, err = kubectl("scale", "llama", "--decode", "0")
    assert code == 3
    assert "no worker could decode; set both to 0 to stop serving" in err


def test_decisions_come_from_the_status(control_plane, service, kubectl):
    manifest = service("internal")
    decision = {"time": CREATED, "role": "decode", "action": "scale", "before": 2, "after": 3, "reason": "queue of 9 s"}
    patch = {"status": {"decisions": [decision]}}
    control_plane.merge(control_plane.path(manifest, "status"), patch).raise_for_status()
    code, out, _ = kubectl("decisions", "llama")
    assert code == 0
    assert out.splitlines()[1].split(maxsplit=6) == [CREATED, "decode", "scale", "2", "→", "3", "queue of 9 s"]


def test_drained_pod_is_evicted_and_waited_for(control_plane, namespace, service, kubectl):
    service()
    path = put_pod(control_plane, namespace, "llama-decode-5d8f-a", "decode")
    code, out, _ = kubectl("drain", "llama-decode-5d8f-a")
    assert code == 0
    assert out.splitlines()[-1] == "llama-decode-5d8f-a is gone"
    assert control_plane.api.get(path).status_code == 404


def test_disruption_budget_holds_a_drain_back(control_plane, namespace, service, kubectl):
    service()
    path = put_pod(control_plane, namespace, "llama-decode-5d8f-a", "decode")
    budget = {
        "apiVersion": control_plane.newest("policy/v1", "policy/v1beta1"),
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep", "namespace": namespace},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"tandem.dev/role": "decode"}}},
    }
    control_plane.apply(budget).raise_for_status()
    seen = control_plane.path(budget)
    wait_equal(lambda: control_plane.get(seen).get("status", {}).get("expectedPods"), 1, PATIENCE_S)
    code, _, err = kubectl("drain", "llama-decode-5d8f-a")
    assert code == 1
    assert "disruption budget" in err
    assert control_plane.api.get(path).status_code == 200


def test_forbidden_command_names_missing_permission(control_plane, namespace, service, kubectl, tmp_path):
    service()
    config = json.loads(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": "nobody's"}
    foreign = tmp_path / "stranger"
    foreign.write_text(json.dumps(config))
    code, _, err = kubectl("status", kubeconfig=foreign)
    assert code == 3
    assert "the API server rejected the credentials" in err
    # Known, and without a single right: a service account of the namespace.
    config["users"][0]["user"] = {"token": token_of(control_plane, namespace)}
    foreign.write_text(json.dumps(config))
    code, _, err = kubectl("status", kubeconfig=foreign)
    assert code == 3
    assert re.search(r'not permitted: .*cannot list resource "modelservices".* with a Role', err)


def token_of(cluster: ControlPlane, namespace: str) -> str:
    """Of the namespace's default service account."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return cluster.api.post(path, json=body).raise_for_status().json()["status"]["token"]


def test_kubectl_tandem_without_crds_names_install_command(control_plane, kubectl, monkeypatch):
    monkeypatch.setattr("tandem_services.cli.k8s.cluster.API", "apis/not-installed.tandem.dev/v1")
    code, _, err = kubectl("status")
    assert code == 3
    assert "kubectl apply --server-side -f charts/tandem/crds/" in err
