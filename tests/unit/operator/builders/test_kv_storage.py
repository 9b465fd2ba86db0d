"""`engine.storage`: volumes and flags of workers that keep KV pages in files, and what is refused."""

from typing import Any

import pytest

from tandem_operator.builders.worker import worker_labels, worker_template
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis
from tandem_testing.kube_cluster import service_of

CACHE = {"hostCache": {"sizeGib": 8}}


def pod(storage: dict[str, Any], role: str = "decode", **engine: Any) -> dict[str, Any]:
    service = service_of(engine={**CACHE, **engine, "storage": storage})
    assert problems_of(service, ClusterApis()) == []
    template = worker_template(service, role, worker_labels(service, role, "r1"), standby=False)
    return template["spec"]


def flag(spec: dict[str, Any], name: str) -> str:
    words = spec["containers"][0]["args"]
    return words[words.index(name) + 1]


def volume(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in spec["volumes"] if one["name"] == "kv-storage"]


def test_storage_without_a_claim_is_an_empty_volume_beyond_its_files():
    spec = pod({"sizeGib": 40.5})
    assert volume(spec) == [{"name": "kv-storage", "emptyDir": {"sizeLimit": "46Gi"}}]
    assert {"name": "kv-storage", "mountPath": "/kv"} in spec["containers"][0]["volumeMounts"]
    assert (flag(spec, "--hicache-storage-dir"), flag(spec, "--hicache-storage-size")) == ("/kv", "40.5")
    assert "--hicache-storage-prefetch-timeout" not in spec["containers"][0]["args"]


def test_storage_on_a_claim_is_a_directory_of_it():
    spec = pod({"claimName": "kv", "path": "a/b", "waitSeconds": 2.5})
    assert volume(spec) == [{"name": "kv-storage", "persistentVolumeClaim": {"claimName": "kv"}}]
    assert (flag(spec, "--hicache-storage-dir"), flag(spec, "--hicache-storage-prefetch-timeout")) == ("/kv/a/b", "2.5")


def test_storage_in_a_directory_of_the_pod_has_no_volume():
    spec = pod({"directory": "/nvme/kv"})
    assert volume(spec) == []
    assert flag(spec, "--hicache-storage-dir") == "/nvme/kv"


def test_storage_of_a_role_replaces_the_common_one():
    service = service_of(engine={**CACHE, "storage": {"sizeGib": 1}}, prefill={"engine": {"storage": {"path": "p"}}})
    templates = {
        role: worker_template(service, role, worker_labels(service, role, "r1"), standby=False)["spec"]
        for role in ("prefill", "decode")
    }
    assert flag(templates["prefill"], "--hicache-storage-dir") == "/kv/p"
    assert flag(templates["decode"], "--hicache-storage-size") == "1"


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"storage": {}}, "engine.storage keeps what leaves host memory, and there is none; set engine.hostCache.size"),
        ({"storage": {}, "hostCache": {"swapGib": 1}}, "set engine.hostCache.sizeGib, or remove storage"),
        ({"storage": {}, **CACHE, "tensorParallelSize": 2}, "engine.storage with tensorParallelSize 2"),
        ({"storage": {"directory": "/nvme/../etc"}, **CACHE}, "spec.engine.storage.directory"),
    ],
)
def test_storage_that_no_engine_takes_is_refused(engine, problem):
    found = problems_of(service_of(engine=engine), ClusterApis())
    assert found
    assert any(problem in one for one in found), found
