"""The operator on a real cluster, installed as people install it, and a ModelService as people write and watch it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem_testing.control_plane import ControlPlane, Manifest
from tandem_testing.e2e.pods import Pods
from tandem_testing.e2e.service import IMAGES, TAG
from tandem_testing.waiting import wait_for

INSTALL = Path(__file__).parents[4] / "charts/install.yaml"
NAMESPACE = "tandem-system"
OPERATORS = {"app.kubernetes.io/component": "operator"}
READY_S = 240.0
BUDGETS = ("policy/v1", "policy/v1beta1")


def install(cluster: ControlPlane) -> Pods:
    """charts/install.yaml with our images; its pods, once they are ready."""
    pods = Pods(cluster=cluster, namespace=NAMESPACE)
    replicas = 0
    for manifest in yaml.safe_load_all(INSTALL.read_text()):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            container["image"] = f"localhost/tandem/operator:{TAG}"
            container["args"] += [f"--{name.replace('_', '-')}={image}" for name, image in IMAGES.items()]
            replicas = manifest["spec"]["replicas"]
        if manifest["apiVersion"] == BUDGETS[0] and not cluster.serves(BUDGETS[0]):
            manifest["apiVersion"] = BUDGETS[1]
            # It came with 1.26.
            del manifest["spec"]["unhealthyPodEvictionPolicy"]
        answer = cluster.apply(manifest)
        assert answer.status_code < 300, f"{manifest['kind']}: {answer.text}"
    pods.wait_ready(OPERATORS, replicas)
    return pods


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """A ModelService."""

    cluster: ControlPlane
    namespace: str
    name: str

    @property
    def path(self) -> str:
        """Of the object."""
        return f"/apis/tandem.dev/v1beta1/namespaces/{self.namespace}/modelservices/{self.name}"

    def apply(self, spec: dict[str, Any]) -> None:
        """As `kubectl apply --server-side` does: fields that are no longer named go."""
        manifest = {
            "apiVersion": "tandem.dev/v1beta1",
            "kind": "ModelService",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        }
        answer = self.cluster.apply(manifest, manager="kubectl")
        assert answer.status_code < 300, answer.text

    def read(self) -> Manifest:
        """The object as it is."""
        found: Manifest = self.cluster.get(self.path)
        return found

    def condition(self, kind: str) -> Manifest:
        """A condition of the generation that is there; {} before it has been looked at."""
        body = self.read()
        status = body.get("status", {})
        if status.get("observedGeneration") != body["metadata"]["generation"]:
            return {}
        return next((one for one in status["conditions"] if one["type"] == kind), {})

    def wait_ready(self, timeout_s: float = READY_S) -> Manifest:
        """Until `Ready` is true of the spec as it is now. Its status."""
        wait_for(lambda: self.condition("Ready").get("status") == "True", timeout_s, self.explain)
        status: Manifest = self.read()["status"]
        return status

    def wait_for_workers(self, selector: dict[str, str], count: int) -> None:
        """Until the role has so many ready pods and the service is Ready with them."""
        Pods(cluster=self.cluster, namespace=self.namespace).wait_ready(selector, count)
        self.wait_ready()

    def explain(self) -> str:
        """Conditions, pods, and the operator's newest log."""
        pods = Pods(cluster=self.cluster, namespace=self.namespace)
        operators = Pods(cluster=self.cluster, namespace=NAMESPACE)
        logs = [operators.log(one["metadata"]["name"], 15) for one in operators.named(OPERATORS)]
        return "\n".join([json.dumps(self.read().get("status", {}), indent=1), pods.explain(), *logs])
