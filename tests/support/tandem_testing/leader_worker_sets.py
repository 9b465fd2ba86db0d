"""What the LeaderWorkerSet controller does with the sets of one namespace, one turn at a time.

Pods of each group are made, those of groups beyond `replicas` go, a group that loses a pod goes as a whole and is made
again (RecreateGroupOnPodRestart), and containers get the same environment. Nothing of its rolling updates.
"""

import copy
from dataclasses import dataclass
from typing import Any

from tandem_testing.control_plane import ControlPlane

GROUP = "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True)
class LeaderWorkerSets:
    """Those of one namespace."""

    cluster: ControlPlane
    namespace: str

    def all(self) -> dict[str, dict[str, Any]]:
        """By name."""
        path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{self.namespace}/leaderworkersets"
        return {one["metadata"]["name"]: one for one in self.cluster.get(path)["items"]}

    def pods(self, name: str) -> dict[str, dict[str, Any]]:
        """Of a set, by name, those that go left out."""
        return {one["metadata"]["name"]: one for one in self._found(name) if not _leaves(one)}

    def turn(self) -> None:
        """Make what is wanting, and have go what is too much."""
        for name, one in self.all().items():
            wanted = {pod["metadata"]["name"]: pod for pod in _pods_of(one)}
            found = self._found(name)
            broken = {_group_of(pod) for pod in found if _leaves(pod)}
            there = {pod["metadata"]["name"]: pod for pod in found}
            for pod_name, pod in there.items():
                if not _leaves(pod) and (pod_name not in wanted or _group_of(pod) in broken):
                    self.cluster.api.delete(f"{self._pods}/{pod_name}")
            for missing in wanted.keys() - there.keys():
                # A group begins when nothing of the former one is left.
                if _group_of(wanted[missing]) not in broken:
                    self.cluster.api.post(self._pods, json=wanted[missing])

    def hold(self, pod: str) -> None:
        """It leaves from its deletion until `release`."""
        self._annotate(pod, {"fake-kubelet/hold": "true"})

    def release(self, pod: str) -> None:
        self._annotate(pod, {"fake-kubelet/hold": None})

    def _annotate(self, pod: str, annotations: dict[str, str | None]) -> None:
        patch = {"metadata": {"annotations": annotations}}
        self.cluster.merge(f"{self._pods}/{pod}", patch).raise_for_status()

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def _found(self, name: str) -> list[dict[str, Any]]:
        answer = self.cluster.api.get(self._pods, params={"labelSelector": f"{GROUP}/name={name}"})
        found: list[dict[str, Any]] = answer.raise_for_status().json()["items"]
        return found


def _group_of(pod: dict[str, Any]) -> str:
    group: str = pod["metadata"]["labels"][f"{GROUP}/group-index"]
    return group


def _leaves(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _pods_of(group_set: dict[str, Any]) -> list[dict[str, Any]]:
    spec = group_set["spec"]
    size = spec["leaderWorkerTemplate"]["size"]
    return [_pod(group_set, group, index, size) for group in range(spec["replicas"]) for index in range(size)]


def _pod(group_set: dict[str, Any], group: int, index: int, size: int) -> dict[str, Any]:
    metadata, templates = group_set["metadata"], group_set["spec"]["leaderWorkerTemplate"]
    template = copy.deepcopy(templates["workerTemplate" if index else "leaderTemplate"])
    leader = f"{metadata['name']}-{group}"
    address = f"{leader}.{metadata['name']}.{metadata['namespace']}"
    reported = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index)}
    for container in template["spec"]["containers"]:
        container["env"] = [{"name": key, "value": value} for key, value in reported.items()] + container.get("env", [])
    labels = {
        f"{GROUP}/name": metadata["name"],
        f"{GROUP}/group-index": str(group),
        f"{GROUP}/worker-index": str(index),
    }
    annotations = {f"{GROUP}/leader-name": leader} if index else {}
    owner = {
        "apiVersion": group_set["apiVersion"],
        "kind": group_set["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template.get("metadata", {}),
            "name": f"{leader}-{index}" if index else leader,
            "labels": {**template["metadata"]["labels"], **labels},
            "annotations": {**template["metadata"].get("annotations", {}), **annotations},
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }
