"""Adapters of a service against a real API server: added and removed while it serves, without another pod."""

import json

import pytest

from tandem_services.cli.k8s import command
from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.custom_resources import model_adapter
from tandem_testing.kube_answering import answering
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal

pytestmark = KUBE

SQL = {"name": "sql", "source": {"claim": {"claimName": "adapters", "path": "sql"}}}
ADAPTERS = "/apis/tandem.dev/v1beta1/namespaces/{}/modeladapters/{}"


@pytest.fixture
def claim(control_plane, namespace):
    """`adapters`, bound: no pod with it is scheduled before."""
    spec = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"adapters-{namespace}"},
        "spec": {**spec, "capacity": size, "hostPath": {"path": "/adapters"}},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "adapters", "namespace": namespace},
        "spec": {**spec, "resources": {"requests": size}, "volumeName": volume["metadata"]["name"]},
    }
    for manifest in (volume, claim):
        control_plane.apply(manifest).raise_for_status()
    path = control_plane.path(claim)
    wait_equal(lambda: control_plane.get(path)["status"]["phase"], "Bound", PATIENCE_S)
    yield
    control_plane.api.delete(control_plane.path(volume)).raise_for_status()


@pytest.fixture
def pods(services, claim):
    with answering(services) as one:
        yield one


@pytest.fixture
def trying(operator_kubeconfig, namespace, tmp_path):
    """An operator that sends canaries and commands."""
    flags = ("--canary", "on", "--namespaces", namespace, "--no-leader-elect")
    with operator(operator_kubeconfig, tmp_path / "operator.log", *flags) as one:
        yield one


def states(services):
    found = services.get().get("status", {}).get("adapters", [])
    return {one["name"]: one["state"] for one in found}


def conditions(services, name):
    found = services.cluster.get(ADAPTERS.format(services.namespace, name)).get("status", {}).get("conditions", ())
    return {one["type"]: (one["status"], one["reason"]) for one in found}


def uids(services):
    return {one["metadata"]["uid"] for part in ("worker", "gateway") for one in services.pods(part)}


def test_adapters_come_and_go_without_new_pods(services, pods, trying, capsys):
    services.apply(**pods.spec(adapters=[SQL], adapterClaims=["adapters"]))
    services.wait_ready()
    wait_equal(lambda: states(services), {"sql": "Loaded"}, PATIENCE_S, trying.log)
    before = uids(services)
    (status,) = services.get()["status"]["adapters"]
    assert (status["source"], status["digest"]) == ("claims/adapters/sql", "d" * 32)
    assert (status["prefill"], status["decode"]) == (1, 1)
    services.wait_condition("AdaptersReady", "True", "AllLoaded")

    services.cluster.apply(model_adapter(services.namespace, "law", pinned=True)).raise_for_status()
    loaded = {"Accepted": ("True", "Accepted"), "Ready": ("True", "Loaded")}
    wait_equal(lambda: conditions(services, "law"), loaded, PATIENCE_S, trying.log)
    shown = services.cluster.kubectl("-n", services.namespace, "get", "madapter", "law", "--no-headers").split()
    assert shown[:5] == ["law", "chat", "True", "2", "Loaded"]
    assert command.main(["adapters", "--kubeconfig", str(services.cluster.kubeconfig), "-n", services.namespace]) == 0
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "ModelAdapter law" in printed["law"]
    assert "d" * 32 in printed["sql"]

    services.apply(**pods.spec(adapterClaims=["adapters"]))
    wait_equal(lambda: states(services), {"law": "Loaded"}, PATIENCE_S, trying.log)
    services.cluster.api.delete(ADAPTERS.format(services.namespace, "law")).raise_for_status()
    wait_equal(lambda: states(services), {}, PATIENCE_S, trying.log)
    assert pods.adapters == {}
    assert uids(services) == before


def table(services, capsys):
    """Lines of `kubectl tandem adapters`, by the name of the adapter."""
    assert command.main(["adapters", "--kubeconfig", str(services.cluster.kubeconfig), "-n", services.namespace]) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def model_adapter_status(services, name):
    return services.cluster.get(ADAPTERS.format(services.namespace, name)).get("status", {})


def test_names_are_announced_at_zero_and_loaded_by_the_first_workers(services, pods, trying, capsys):
    zero = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    services.apply(**pods.spec(adapters=[SQL], adapterClaims=["adapters"], **zero))
    services.cluster.apply(model_adapter(services.namespace, "law")).raise_for_status()
    wait_equal(lambda: pods.announced, ["law", "sql"], PATIENCE_S, trying.log)
    wait_equal(lambda: states(services), {"law": "Pending", "sql": "Pending"}, PATIENCE_S, trying.log)
    assert pods.adapters == {}, "no worker could read it"
    messages = {"no worker is ready"}
    wait_equal(
        lambda: {one["message"] for one in services.get()["status"]["adapters"]}, messages, PATIENCE_S, trying.log
    )
    assert " Pending " in table(services, capsys)["law"]

    services.apply(**pods.spec(adapters=[SQL], adapterClaims=["adapters"]))
    wait_equal(lambda: states(services), {"law": "Loaded", "sql": "Loaded"}, PATIENCE_S, trying.log)
    assert {" Loaded " in line for name, line in table(services, capsys).items() if name in ("law", "sql")} == {True}
    workers = {one["metadata"]["name"] for one in services.pods("worker")}
    wait_equal(lambda: model_adapter_status(services, "law").get("loaded"), len(workers), PATIENCE_S, trying.log)
    assert {one["name"] for one in model_adapter_status(services, "law")["workers"]} == workers

    services.cluster.api.delete(ADAPTERS.format(services.namespace, "law")).raise_for_status()
    wait_equal(lambda: states(services), {"sql": "Loaded"}, PATIENCE_S, trying.log)
    assert (pods.announced, set(pods.adapters)) == (["sql"], {"sql"})
    services.apply(**pods.spec(adapterClaims=["adapters"]))
    wait_equal(lambda: (states(services), pods.announced, pods.adapters), ({}, [], {}), PATIENCE_S, trying.log)


def test_announced_name_is_withdrawn_while_its_load_fails(services, pods, trying):
    reason = "no such folder"
    pods.refused["sql"] = {"done": False, "message": f"1 worker: {reason}", "failed": {"chat-decode-x": reason}}
    services.apply(**pods.spec(adapters=[SQL]))
    wait_equal(lambda: (states(services), pods.announced), ({"sql": "Failed"}, []), PATIENCE_S, trying.log)
    assert ("load", "sql") in pods.journal


def test_announced_name_that_is_removed_at_zero_is_withdrawn(services, pods, trying):
    zero = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    services.apply(**pods.spec(adapterClaims=["adapters"], **zero))
    services.cluster.apply(model_adapter(services.namespace, "law")).raise_for_status()
    wait_equal(lambda: pods.announced, ["law"], PATIENCE_S, trying.log)
    services.cluster.api.delete(ADAPTERS.format(services.namespace, "law")).raise_for_status()
    wait_equal(lambda: (states(services), pods.announced), ({}, []), PATIENCE_S, trying.log)


def test_model_adapter_is_refused_with_the_reason(services, pods, trying):
    lonely = model_adapter(services.namespace, "lonely")
    services.cluster.apply(lonely).raise_for_status()
    missing = {"Accepted": ("False", "ServiceMissing"), "Ready": ("False", "NotAccepted")}
    wait_equal(lambda: conditions(services, "lonely"), missing, PATIENCE_S, trying.log)
    services.apply(**pods.spec(adapters=[SQL]))
    for name, spec in (("same", {"name": "sql"}), ("model", {"name": "chat"})):
        services.cluster.apply(model_adapter(services.namespace, name, **spec)).raise_for_status()
    elsewhere = {"source": {"claim": {"claimName": "other"}}}
    services.cluster.apply(model_adapter(services.namespace, "elsewhere", **elsewhere)).raise_for_status()
    refused = {"same": "NameTaken", "model": "NameTaken", "elsewhere": "NotMounted", "lonely": "Accepted"}
    wait_equal(
        lambda: {name: conditions(services, name).get("Accepted", ("", ""))[1] for name in refused},
        refused,
        PATIENCE_S,
        trying.log,
    )
    for name in ("same", "model", "elsewhere"):
        services.wait_event("Warning", refused[name], name)
    services.wait_event("Normal", "Accepted", "lonely")


def test_failed_workers_are_named_until_they_load_it(services, pods, trying):
    reason = "r of layer 0 is 128, above --max-lora-rank 64"
    pods.refused["sql"] = {"done": False, "message": f"1 worker: {reason}", "failed": {"chat-decode-x": reason}}
    services.apply(**pods.spec(adapters=[SQL]))
    wait_equal(lambda: states(services), {"sql": "Failed"}, PATIENCE_S, trying.log)
    (status,) = services.get()["status"]["adapters"]
    assert status["failed"] == [{"name": "chat-decode-x", "reason": reason}], json.dumps(status)
    services.wait_condition("AdaptersReady", "False", "AdapterFailed")
    services.wait_event("Warning", "AdapterFailed")
    assert services.condition("Ready")[0] == "True", "the model serves"
    pods.refused.clear()
    # Another source is tried at once.
    other = {**SQL, "source": {"claim": {"claimName": "adapters", "path": "sql-2"}}}
    services.apply(**pods.spec(adapters=[other]))
    wait_equal(lambda: states(services), {"sql": "Loaded"}, PATIENCE_S, trying.log)
