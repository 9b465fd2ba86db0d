"""Adapters in the workers' pods: volumes below one folder, downloads, flags."""

from pathlib import Path
from typing import Any

import yaml

from tandem_operator.builders.adapters import FOLDER, folder_of
from tandem_operator.builders.policies import network_policies
from tandem_operator.builders.worker import worker_deployment
from tandem_operator.planning.status import referenced_secrets
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_cluster import service_of

SPEC = yaml.safe_load((Path(__file__).parents[4] / "examples/adapters.yaml").read_text())["spec"]
COMMIT = "0123456789abcdef" * 2 + "01234567"


def pod_of(**spec: Any) -> dict[str, Any]:
    return worker_deployment(service_of(**spec), "decode", "r1", 1)["spec"]["template"]["spec"]


def hub(**fields: Any) -> dict[str, Any]:
    return {"huggingFace": {"id": "example/legal", "revision": COMMIT, **fields}}


def adapters(*sources: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": f"a{number}", "source": source} for number, source in enumerate(sources)]


def claim(path: str = "", name: str = "tuned") -> dict[str, Any]:
    return {"claim": {"claimName": name, "path": path}}


def mounted(pod: dict[str, Any]) -> dict[str, bool]:
    """Folders of adapters in the worker, and whether they are read-only."""
    mounts = pod["containers"][0]["volumeMounts"]
    return {one["mountPath"]: one.get("readOnly", False) for one in mounts if one["mountPath"].startswith(FOLDER)}


def test_each_claim_is_mounted_once_read_only():
    pod = pod_of(adapters=adapters(claim("a"), claim("b"), claim(name="other")), adapterClaims=["tuned", "empty"])
    assert mounted(pod) == dict.fromkeys((f"{FOLDER}/claims/{name}" for name in ("empty", "other", "tuned")), True)
    names = [one["name"] for one in pod["volumes"]]
    assert len(names) == len(set(names))
    claims = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"claimName": name, "readOnly": True} for name in ("empty", "other", "tuned")]


def test_workers_take_adapters_while_they_run():
    words = pod_of(adapterClaims=["tuned"])["containers"][0]["args"]
    assert words[words.index("--lora-dir") + 1] == FOLDER
    assert "--allow-runtime-lora-updating" in words
    assert "--lora-dir" not in pod_of()["containers"][0]["args"]


def test_limits_are_flags_of_the_worker():
    limits = {"maxLoraRank": 32, "maxCpuLoras": 64, "turnSeconds": 2.5}
    words = pod_of(engine={"lora": limits}, decode={"engine": {"lora": {"maxLoraRank": 8}}})["containers"][0]["args"]
    assert words[words.index("--max-lora-rank") :][:2] == ["--max-lora-rank", "8"]
    assert "--max-cpu-loras" not in words, "those of a role replace the common ones"
    words = pod_of(engine={"lora": limits})["containers"][0]["args"]
    assert words[words.index("--max-cpu-loras") :][:4] == ["--max-cpu-loras", "64", "--lora-turn", "2.5"]


def test_adapter_repository_is_downloaded_to_its_flag_path():
    service = service_of(adapters=adapters(hub(tokenSecret={"name": "hub", "key": "token"})))
    (source,) = (one.source for one in service.spec.adapters)
    pod = pod_of(adapters=adapters(hub(tokenSecret={"name": "hub", "key": "token"})))
    (download,) = pod["initContainers"]
    words = download["command"]
    assert words[:5] == ["hf", "download", "example/legal", "--revision", COMMIT]
    folder = f"{FOLDER}/{folder_of(source)}"
    assert words[words.index("--local-dir") + 1] == folder
    assert [word for word in words if "adapter_" in word] == ["adapter_config.json", "adapter_model.safetensors"]
    (place,) = mounted(pod)
    assert folder.startswith(f"{place}/")
    store = next(one for one in download["volumeMounts"] if one["mountPath"] == place)
    assert not store.get("readOnly")
    assert referenced_secrets(service) == ["hub"]


def test_repositories_on_one_claim_share_its_volume():
    sources = (hub(cacheClaim="cache"), hub(id="example/b", cacheClaim="cache"), hub())
    pod = pod_of(adapters=adapters(*sources))
    names = [one["name"] for one in pod["initContainers"]]
    assert len(names) == len(set(names)) == 3
    assert len(mounted(pod)) == 2
    assert len({one["name"] for one in pod["volumes"]}) == len(pod["volumes"])


def test_folders_of_different_sources_differ():
    image = {"image": {"reference": "registry.example/a:1"}}
    sources = (claim("a"), claim("b"), claim("a", "x"), image, hub(), hub(cacheClaim="c"), hub(revision="b" * 40))
    service = service_of(adapters=adapters(*sources))
    folders = [folder_of(one.source) for one in service.spec.adapters]
    assert len(set(folders)) == len(folders)
    assert folders[0] == "claims/tuned/a"


def test_workers_alone_reach_the_hub_for_adapters():
    policies = network_policies(service_of(adapters=adapters(hub())), OperatorSettings())
    reach = {
        one["metadata"]["name"]
        for one in policies
        for rule in one["spec"].get("egress", ())
        if {"protocol": "TCP", "port": 443} in rule.get("ports", ())
    }
    assert reach == {"chat-worker"}


def test_example_has_every_kind_of_source():
    pod = pod_of(**SPEC)
    kinds = {folder.split("/")[2] for folder in mounted(pod)}
    assert kinds == {"claims", "images", "hub"}
    assert len(pod["initContainers"]) == 2
