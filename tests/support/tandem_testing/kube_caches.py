"""ModelCaches in a namespace of a real control plane, whose Jobs end as a test says: nodes there run no containers."""

import json
from dataclasses import dataclass
from typing import Any

from tandem_testing.control_plane import PATIENCE_S, ControlPlane
from tandem_testing.custom_resources import model_cache
from tandem_testing.kube_services import GROUP
from tandem_testing.waiting import wait_for

Manifest = dict[str, Any]
FINGERPRINT = "f" * 64


@dataclass(frozen=True)
class Caches:
    """Those of one namespace."""

    cluster: ControlPlane
    namespace: str

    def apply(self, name: str = "qwen", **spec: Any) -> None:
        """Make or change one; `spec` over the smallest one."""
        self.cluster.apply(model_cache(self.namespace, name, **spec), force=True).raise_for_status()

    def path(self, name: str = "qwen") -> str:
        return f"{GROUP}/namespaces/{self.namespace}/modelcaches/{name}"

    def status(self, name: str = "qwen") -> Manifest:
        found: Manifest = self.cluster.get(self.path(name)).get("status", {})
        return found

    def condition(self, kind: str, name: str = "qwen") -> tuple[str, str]:
        """Status and reason; empty before there is one."""
        conditions = self.status(name).get("conditions", [])
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def jobs(self, name: str = "qwen") -> list[Manifest]:
        return self._list("apis/batch/v1", "jobs", name)

    def pods(self, name: str = "qwen") -> list[Manifest]:
        return self._list("api/v1", "pods", name)

    def owned(self, name: str = "qwen") -> list[str]:
        """Kinds of all objects with its label."""
        kinds = {
            "jobs": "apis/batch/v1",
            "persistentvolumeclaims": "api/v1",
            "networkpolicies": "apis/networking.k8s.io/v1",
        }
        return [kind for kind, root in kinds.items() if self._list(root, kind, name)]

    def wait_pod(self, word: str, name: str = "qwen", *, phase: str = "Running") -> Manifest:
        """The pod of the Job whose name has `word`.

        `phase`: Pending where its claim is bound to no volume. A node writes over what a test says of a pod that it has
        just got.
        """

        def found() -> list[Manifest]:
            mine = [one for one in self.pods(name) if word in one["metadata"]["name"]]
            return [one for one in mine if one["status"].get("phase") == phase and not _is_leaving(one)]

        wait_for(lambda: bool(found()), PATIENCE_S, lambda: str((self.jobs(name), self.status(name))))
        return found()[0]

    def set_pod(self, pod: Manifest, status: Manifest) -> None:
        """Write a part of its status, as the kubelet does."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        headers = {"Content-Type": "application/strategic-merge-patch+json"}
        self.cluster.api.patch(path, content=json.dumps({"status": status}), headers=headers).raise_for_status()

    def end(self, pod: Manifest, code: int, **result: Any) -> None:
        """Its container ends with `result` as its termination message."""
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": json.dumps(result)}
        container = {
            "name": "download",
            "image": "tandem",
            "imageID": "fake",
            "ready": False,
            "restartCount": 0,
            "state": {"running": None, "terminated": ended},
        }
        phase = "Failed" if code else "Succeeded"
        self.set_pod(pod, {"phase": phase, "containerStatuses": [container]})

    def download(self, commit: str, *, word: str = "-download-", phase: str = "Running") -> None:
        """Let the Job of the ModelCache `qwen` find `commit`. `word`, `phase`: as of `wait_pod`."""
        pod = self.wait_pod(word, phase=phase)
        self.end(pod, 0, commit=commit, size=5_000_000_000, files=3, fingerprint=FINGERPRINT, removed=0)

    def _list(self, root: str, plural: str, name: str) -> list[Manifest]:
        path = f"/{root}/namespaces/{self.namespace}/{plural}"
        answer = self.cluster.api.get(path, params={"labelSelector": f"tandem.dev/cache={name}"})
        items: list[Manifest] = answer.raise_for_status().json()["items"]
        return items


def _is_leaving(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]
