"""ModelCaches against a real API server: one Job, its progress, services that wait, and commits that go."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_caches import Caches
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

A, B = "a" * 40, "b" * 40
CACHED = {"model": {"cacheRef": {"name": "qwen"}}}
ADDRESS = "127.244.251.7"
"""Of the loopback network, where this test answers for a container."""


def source(revision):
    return {"huggingFace": {"id": "org/mini", "revision": revision}}


@pytest.fixture
def caches(control_plane, namespace):
    return Caches(control_plane, namespace)


@pytest.fixture
def storage(control_plane, namespace):
    """A claim of a class with one volume: no pod with it is scheduled before it is bound."""
    name = f"weights-{namespace}"
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": name, "capacity": {"storage": "10Gi"}}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**spec, "hostPath": {"path": "/weights"}},
    }
    control_plane.apply(volume).raise_for_status()
    yield {"newClaim": {"size": "10Gi", "storageClassName": name}}
    control_plane.api.delete(control_plane.path(volume)).raise_for_status()


@pytest.fixture
def progress():
    """What the container says at its port."""
    document = {"done": 10, "total": 40, "file": "model.safetensors", "rate": 7}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Nothing."""

    server = ThreadingHTTPServer((ADDRESS, 8080), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield document
    server.shutdown()
    server.server_close()


def mounted(services):
    """Directories of the claim that workers mount."""
    pods = [one["spec"]["template"]["spec"] for name, one in services.deployments().items() if "-gateway" not in name]
    places = [mount for pod in pods for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "model"]
    return {(one["subPath"], one["readOnly"]) for one in places}


def test_service_starts_when_its_cache_is_ready(services, caches, storage, progress, running):
    services.apply(**CACHED)
    services.wait_condition("ModelCached", "False", "CacheMissing")
    caches.apply(storage=storage)
    pod = caches.wait_pod("-download-")
    services.wait_condition("ModelCached", "False", "Downloading")
    assert services.deployments() == {}
    caches.set_pod(pod, {"podIP": ADDRESS, "podIPs": [{"$patch": "replace"}, {"ip": ADDRESS}]})
    wait_equal(lambda: caches.status().get("progress"), "25%", PATIENCE_S, running.log)
    assert caches.status()["currentFile"] == "model.safetensors"
    shown = services.cluster.kubectl("-n", services.namespace, "get", "mc", "qwen", "--no-headers").split()
    assert shown[:4] == ["qwen", "Downloading", "25%", "0.0"]
    assert len(caches.jobs()) == 1

    caches.download(A)
    wait_equal(lambda: caches.status().get("state"), "Ready", PATIENCE_S, running.log)
    services.wait_condition("ModelCached", "True", "Cached")
    services.wait_ready()
    assert mounted(services) == {(f"tandem-cache/qwen/{A}", True)}
    wait_equal(caches.jobs, [], PATIENCE_S)
    (workers,) = [one for name, one in services.deployments().items() if "-decode-" in name]
    assert "initContainers" not in workers["spec"]["template"]["spec"]


def test_next_commit_rolls_and_the_former_one_is_removed(services, caches, storage, running):
    caches.apply(storage=storage, source=source("v1"))
    services.apply(**CACHED)
    caches.download(A)
    services.wait_ready()
    before = services.get()["status"]["revision"]

    caches.apply(storage=storage, source=source("v2"))
    wait_equal(lambda: caches.condition("Ready"), ("True", "FormerCommit"), PATIENCE_S, running.log)
    assert services.get()["status"]["revision"] == before
    caches.download(B)
    wait_for(lambda: services.get()["status"]["revision"] != before, PATIENCE_S, running.log)
    services.wait_ready()
    services.wait_one_revision()
    assert mounted(services) == {(f"tandem-cache/qwen/{B}", True)}
    wait_for(lambda: len(caches.status()["commits"]) == 2, PATIENCE_S)
    wait_for(lambda: bool(caches.status()["commits"][1].get("unusedSince")), PATIENCE_S, running.log)

    # The test does not wait five minutes.
    commits = caches.status()["commits"]
    commits[1]["unusedSince"] = "2020-01-01T00:00:00Z"
    path = f"{caches.path()}/status"
    services.cluster.merge(path, {"status": {"commits": commits}}).raise_for_status()
    pod = caches.wait_pod("-prune-")
    assert pod["spec"]["containers"][0]["args"][:2] == [f"org/mini@{B}", "--prune"]
    caches.download(B, word="-prune-")
    wait_equal(lambda: [one["commit"] for one in caches.status()["commits"]], [B], PATIENCE_S, running.log)
    wait_equal(caches.jobs, [], PATIENCE_S)


def test_failure_is_a_condition_and_an_event(services, caches, running):
    caches.apply(source={"huggingFace": {"id": "org/mini", "tokenSecret": {"name": "hub", "key": "token"}}})
    wait_equal(lambda: caches.condition("Ready"), ("False", "SecretMissing"), PATIENCE_S, running.log)
    assert caches.jobs() == []
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub", "namespace": services.namespace},
        "stringData": {"token": "hf_x"},
    }
    services.cluster.apply(secret).raise_for_status()
    # Nothing tells of a Secret; a change of the spec is looked at at once.
    caches.apply(
        source={"huggingFace": {"id": "org/mini", "tokenSecret": {"name": "hub", "key": "token"}}},
        download={"retries": 2},
    )
    pod = caches.wait_pod("-download-", phase="Pending")
    caches.end(pod, 2, reason="HubAuthRefused", message="the hub refuses org/mini (status 401)", needed=0)
    wait_equal(lambda: caches.condition("Failed"), ("True", "HubAuthRefused"), PATIENCE_S, running.log)
    services.wait_event("Warning", "HubAuthRefused", "qwen")
    assert len(caches.pods()) == 1, "status 2 is final"
    shown = caches.status()["error"]
    assert shown.startswith("HubAuthRefused: spec.source.huggingFace.tokenSecret: Secret 'hub'")


def test_deleted_cache_leaves_nothing_of_its_own(services, caches, running):
    caches.apply()
    caches.wait_pod("-download-", phase="Pending")
    wait_equal(caches.owned, ["jobs", "persistentvolumeclaims", "networkpolicies"], PATIENCE_S, running.log)
    services.apply(**CACHED)
    services.cluster.api.delete(caches.path()).raise_for_status()
    services.wait_condition("ModelCached", "False", "CacheMissing")
    wait_equal(lambda: [one for one in caches.owned() if one != "persistentvolumeclaims"], [], PATIENCE_S, running.log)
    wait_equal(caches.owned, [], PATIENCE_S, lambda: str(caches.pods()))


def test_service_of_a_deleted_cache_is_scaled(services, caches, storage, running):
    """On a claim that remains: one that is being deleted accepts no new pod."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": services.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage["newClaim"]["storageClassName"],
            "resources": {"requests": {"storage": "10Gi"}},
        },
    }
    services.cluster.apply(claim).raise_for_status()
    caches.apply(storage={"claim": {"claimName": "weights"}})
    services.apply(**CACHED)
    caches.download(A)
    services.wait_ready()
    before = services.get()["status"]["revision"]
    services.cluster.api.delete(caches.path()).raise_for_status()
    services.wait_condition("ModelCached", "False", "CacheMissing")
    services.apply(**CACHED, decode={"replicas": 2})
    name = f"chat-decode-{before}"
    wait_equal(lambda: services.deployments()[name]["spec"]["replicas"], 2, PATIENCE_S, running.log)
    services.wait_ready()
    status = services.get()["status"]
    assert status["revision"] == before
    (cached,) = [one for one in status["conditions"] if one["type"] == "ModelCached"]
    assert (cached["status"], "'qwen'" in cached["message"]) == ("False", True)
    assert mounted(services) == {(f"tandem-cache/qwen/{A}", True)}
