"""ModelCaches with a real kubelet: a hub on the node, volumes that are folders of it, and pods that mount commits.

The tests build on each other, in their order.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_operator.builders.naming import ROLE_LABEL, SERVICE_LABEL, gateway_name
from tandem_testing.control_plane import ControlPlane
from tandem_testing.e2e.diary import Diary, of_load
from tandem_testing.e2e.load import Load, more, requests, warm_up
from tandem_testing.e2e.operator import Resource, install
from tandem_testing.e2e.pods import Pods, curl
from tandem_testing.e2e.service import SPEC
from tandem_testing.hub_server import HubServer, hub_server
from tandem_testing.kube_caches import Caches
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = pytest.mark.timeout(900)

MODEL = Path(__file__).parents[2] / "models/tandem-mini"
WEIGHTS = "model-00001-of-00002.safetensors"
PAUSE_S = 0.25
"""After each 64 KiB of `WEIGHTS`: twenty seconds for the file."""
PATIENCE_S = 180.0
USER = 10001


def spec_on(cache: str, **decode: Any) -> dict[str, Any]:
    """A service with the weights of a ModelCache, and one gateway."""
    gateway = {**SPEC["gateway"], "replicas": 1}
    return {**SPEC, "model": {"cacheRef": {"name": cache}}, "gateway": gateway, "decode": {**SPEC["decode"], **decode}}


def workers_of(name: str, role: str) -> dict[str, str]:
    return {SERVICE_LABEL: name, "app.kubernetes.io/component": "worker", ROLE_LABEL: role}


@pytest.fixture(scope="module")
def pods(control_plane: ControlPlane, namespace: str) -> Pods:
    return Pods(cluster=control_plane, namespace=namespace)


@pytest.fixture(scope="module")
def caches(control_plane: ControlPlane, namespace: str) -> Caches:
    install(control_plane)
    return Caches(control_plane, namespace)


@pytest.fixture(scope="module")
def hub(control_plane: ControlPlane) -> Iterator[HubServer]:
    """At the node's own address, which pods reach."""
    addresses = control_plane.get("/api/v1/nodes")["items"][0]["status"]["addresses"]
    with hub_server(next(one["address"] for one in addresses if one["type"] == "InternalIP")) as hub:
        for name in ("org/mini", "org/broken"):
            hub.add(name, MODEL)
        hub.repos["org/mini"].paced[WEIGHTS] = PAUSE_S
        yield hub


@pytest.fixture(scope="module")
def volumes(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Folders of the node that are volumes, each of a class of its own."""
    folders: dict[str, Path] = {}
    for name in ("e2e-made", "e2e-given"):
        folders[name] = Path("/var/lib/tandem-e2e") / name
        shutil.rmtree(folders[name], ignore_errors=True)
        folders[name].mkdir(parents=True)
        shutil.chown(folders[name], USER, USER)
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": name,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folders[name])},
            },
        }
        control_plane.api.delete(control_plane.path(volume))
        wait_for(lambda: control_plane.api.get(control_plane.path(volume)).status_code == 404, 60.0, lambda: name)  # noqa: B023
        control_plane.apply(volume).raise_for_status()
    yield folders
    for name, folder in folders.items():
        control_plane.api.delete(f"/api/v1/persistentvolumes/{name}").raise_for_status()
        shutil.rmtree(folder)


def source(hub: HubServer, repo: str = "org/mini") -> dict[str, Any]:
    return {"huggingFace": {"id": repo, "endpoint": hub.url}}


def service(caches: Caches, name: str) -> Resource:
    return Resource(cluster=caches.cluster, namespace=caches.namespace, name=name)


def commits_on(folder: Path, cache: str) -> list[str]:
    """Whole commits of a ModelCache on its volume."""
    return sorted(one.name for one in (folder / "tandem-cache" / cache).glob("[0-9a-f]*"))


def condition(resource: Resource, kind: str) -> tuple[str, str, str]:
    found = resource.condition(kind)
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def explain(caches: Caches, pods: Pods) -> str:
    return f"{json.dumps([caches.status(name) for name in ('mini', 'broken')])}\n{pods.explain()}"


def test_download_continues_after_its_pod_is_killed(
    caches: Caches, pods: Pods, hub: HubServer, volumes: dict[str, Path], diary: Diary
):
    storage = {"newClaim": {"size": "500Mi", "storageClassName": "e2e-made"}}
    with diary.step("ModelCache: download, its pod killed in the middle → Ready") as entry:
        caches.apply("mini", source=source(hub), storage=storage)
        wait_for(lambda: caches.status("mini").get("bytesDone", 0) > 1e6, PATIENCE_S, lambda: explain(caches, pods))
        (first,) = caches.pods("mini")
        path = f"{pods.core}/pods/{first['metadata']['name']}"
        caches.cluster.api.request("DELETE", path, json={"gracePeriodSeconds": 0}).raise_for_status()
        assert commits_on(volumes["e2e-made"], "mini") == [], "what is not whole is not visible"
        hub.repos["org/mini"].paced.clear()
        wait_equal(lambda: caches.status("mini").get("state"), "Ready", PATIENCE_S, lambda: explain(caches, pods))
        entry["continued at"] = max(hub.starts[WEIGHTS])
    assert max(hub.starts[WEIGHTS]) > 0, hub.starts[WEIGHTS]
    status = caches.status("mini")
    assert commits_on(volumes["e2e-made"], "mini") == [status["commit"]]
    whole = volumes["e2e-made"] / status["path"]
    assert (whole / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    wait_equal(lambda: caches.jobs("mini"), [], PATIENCE_S, lambda: explain(caches, pods))


def test_wrong_digest_is_a_condition_and_no_commit(
    caches: Caches, pods: Pods, hub: HubServer, volumes: dict[str, Path], diary: Diary
):
    """On a claim that exists, and that two ModelCaches share later."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "given", "namespace": caches.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "e2e-given",
            "resources": {"requests": {"storage": "500Mi"}},
        },
    }
    caches.cluster.apply(claim).raise_for_status()
    hub.repos["org/broken"].wrong[WEIGHTS] = 1_000
    with diary.step("ModelCache: wrong bytes → Failed"):
        caches.apply("broken", source=source(hub, "org/broken"), storage={"claim": {"claimName": "given"}})
        failed = ("True", "ChecksumMismatch")
        wait_equal(lambda: caches.condition("Failed", "broken"), failed, PATIENCE_S, lambda: explain(caches, pods))
    assert commits_on(volumes["e2e-given"], "broken") == []
    hub.repos["org/broken"].wrong.clear()


def test_two_services_share_one_download(caches: Caches, pods: Pods, hub: HubServer, diary: Diary):
    before = sum(hub.gets.values())
    with diary.step("two services on one ModelCache → Ready"):
        for name in ("chat", "other"):
            service(caches, name).apply(spec_on("mini"))
        for name in ("chat", "other"):
            service(caches, name).wait_ready()
    for name in ("chat", "other"):
        body = json.dumps({"model": name, "prompt": "The fox", "max_tokens": 8})
        status, answer = curl(f"{pods.service_url(gateway_name(name))}/v1/completions", body)
        assert status == 200, answer
    assert sum(hub.gets.values()) == before
    (worker,) = pods.ready(workers_of("chat", "decode"))
    command = ("-n", caches.namespace, "exec", worker, "--", "sh", "-c", "touch /models/x || echo refused")
    assert "refused" in caches.cluster.kubectl(*command)


def test_deleted_cache_of_a_made_claim_disturbs_no_pod(caches: Caches, pods: Pods, diary: Diary):
    chat = service(caches, "chat")
    url = pods.service_url(gateway_name("chat"))
    references = warm_up(url, "chat", requests())
    commit = caches.status("mini")["commit"]
    with diary.step("ModelCache deleted while two services use it, under load") as entry:
        with Load(url, "chat", references, clients=3) as load:
            caches.cluster.api.delete(caches.path("mini")).raise_for_status()
            wait_equal(lambda: condition(chat, "ModelCached")[:2], ("False", "CacheMissing"), PATIENCE_S, chat.explain)
            more(load, 20)
            # A claim that is being deleted accepts no new pod.
            chat.apply(spec_on("mini", replicas=2))
            wait_for(lambda: "being deleted" in condition(chat, "Degraded")[2], PATIENCE_S, chat.explain)
            chat.apply(spec_on("mini"))
            chat.wait_for_workers(workers_of("chat", "decode"), 1)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    assert load.summary().failed == 0, load.summary().errors
    assert "'mini'" in condition(chat, "ModelCached")[2]
    assert commit in condition(chat, "ModelCached")[2]
    for name in ("chat", "other"):
        caches.cluster.api.delete(service(caches, name).path).raise_for_status()
    claim = f"{pods.core}/persistentvolumeclaims/mini"
    wait_for(lambda: caches.cluster.api.get(claim).status_code == 404, PATIENCE_S, lambda: explain(caches, pods))


def test_service_of_a_deleted_cache_is_scaled_on_a_given_claim(
    caches: Caches, pods: Pods, hub: HubServer, volumes: dict[str, Path], diary: Diary
):
    kept = service(caches, "kept")
    with diary.step("ModelCache deleted, its service scaled from 1 to 2 decode workers, under load") as entry:
        caches.apply("mini", source=source(hub), storage={"claim": {"claimName": "given"}})
        kept.apply(spec_on("mini"))
        revision = kept.wait_ready(480.0)["revision"]
        url = pods.service_url(gateway_name("kept"))
        references = warm_up(url, "kept", requests())
        with Load(url, "kept", references, clients=3) as load:
            caches.cluster.api.delete(caches.path("mini")).raise_for_status()
            wait_equal(lambda: condition(kept, "ModelCached")[:2], ("False", "CacheMissing"), PATIENCE_S, kept.explain)
            kept.apply(spec_on("mini", replicas=2))
            kept.wait_for_workers(workers_of("kept", "decode"), 2)
            more(load, 20)
            # The ModelCache comes back: it finds the commit, and no pod is replaced.
            fetched = sum(hub.gets.values())
            caches.apply("mini", source=source(hub), storage={"claim": {"claimName": "given"}})
            wait_equal(lambda: condition(kept, "ModelCached")[:2], ("True", "Cached"), PATIENCE_S, kept.explain)
        entry["load"] = of_load(load.summary())
    assert load.summary().failed == 0, load.summary().errors
    assert kept.read()["status"]["revision"] == revision
    assert sum(hub.gets.values()) == fetched, "the commit was whole"
    assert len(commits_on(volumes["e2e-given"], "mini")) == 1
