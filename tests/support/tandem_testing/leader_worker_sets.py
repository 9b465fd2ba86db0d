"""What the LeaderWorkerSet controller does with the sets of one namespace, one turn at a time.

Pods of each group are made, those of groups beyond `replicas` go, and containers are told what they would be told.
Nothing of its rolling updates.
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
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        answer = self.cluster.api.get(path, params={"labelSelector": f"{GROUP}/name={name}"})
        found = answer.raise_for_status().json()["items"]
        return {one["metadata"]["name"]: one for one in found if "deletionTimestamp" not in one["metadata"]}

    def turn(self) -> None:
        """Make what is wanting, and have go what is too much."""
        for name, one in self.all().items():
            wanted = {pod["metadata"]["name"]: pod for pod in _pods_of(one)}
            there = self.pods(name)
            for extra in there.keys() - wanted.keys():
                self.cluster.api.delete(f"/api/v1/namespaces/{self.namespace}/pods/{extra}")
            for missing in wanted.keys() - there.keys():
                # 409 while one of that name still goes: the next turn makes it.
                self.cluster.api.post(f"/api/v1/namespaces/{self.namespace}/pods", json=wanted[missing])


def _pods_of(group_set: dict[str, Any]) -> list[dict[str, Any]]:
    spec = group_set["spec"]
    size = spec["leaderWorkerTemplate"]["size"]
    return [_pod(group_set, group, index, size) for group in range(spec["replicas"]) for index in range(size)]


def _pod(group_set: dict[str, Any], group: int, index: int, size: int) -> dict[str, Any]:
    metadata, templates = group_set["metadata"], group_set["spec"]["leaderWorkerTemplate"]
    template = copy.deepcopy(templates["workerTemplate" if index else "leaderTemplate"])
    leader = f"{metadata['name']}-{group}"
    address = f"{leader}.{metadata['name']}.{metadata['namespace']}"
    told = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index)}
    for container in template["spec"]["containers"]:
        container["env"] = [{"name": key, "value": value} for key, value in told.items()] + container.get("env", [])
    labels = {f"{GROUP}/name": metadata["name"], f"{GROUP}/worker-index": str(index)}
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
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }
