"""The ModelGateway `front` in a namespace of a real control plane, as a user sees and changes it."""

import json
from dataclasses import dataclass
from typing import Any

from tandem_testing.control_plane import PATIENCE_S, ControlPlane
from tandem_testing.kube_services import GROUP
from tandem_testing.waiting import wait_equal

FRONT = {"gatewayRef": {"name": "front"}}
"""Of a ModelService behind it."""


def is_leaving(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


@dataclass(frozen=True)
class Front:
    """The ModelGateway `front` of one namespace."""

    cluster: ControlPlane
    namespace: str

    @property
    def path(self) -> str:
        return f"{GROUP}/namespaces/{self.namespace}/modelgateways/front"

    def apply(self, **spec: Any) -> None:
        manifest = {
            "apiVersion": "tandem.dev/v1beta1",
            "kind": "ModelGateway",
            "metadata": {"name": "front", "namespace": self.namespace},
            "spec": spec,
        }
        self.cluster.apply(manifest, force=True).raise_for_status()

    def delete(self) -> None:
        self.cluster.api.delete(self.path).raise_for_status()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.get(self.path).get("status", {})
        return status

    def condition(self, kind: str) -> tuple[str, str]:
        conditions = self.status().get("conditions", [])
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def wait_condition(self, kind: str, status: str, reason: str) -> None:
        wait_equal(lambda: self.condition(kind), (status, reason), PATIENCE_S, lambda: str(self.status()))

    def wait_served(self, **names: list[str]) -> None:
        """Until the models file has these services with these names."""
        wait_equal(self.served, names, PATIENCE_S, lambda: str(self.status()))

    def served(self) -> dict[str, list[str]]:
        """Names of models by service, as the gateways get them."""
        found = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/front-models")
        if found.status_code == 404:
            return {}
        entries = json.loads(found.json()["data"]["models.json"])["models"]
        return {one["cluster"].rpartition(".")[2]: one["served_model_name"] for one in entries}

    def files(self) -> set[str]:
        """Kinds of files that the gateways get, with the service of each."""
        data = self.cluster.get(f"/api/v1/namespaces/{self.namespace}/secrets/front-fleets").get("data", {})
        return {f"{name.split('.')[0]} {'keys' if name.endswith('.json') else name.split('.')[1]}" for name in data}

    def pods(self) -> dict[str, tuple[str, bool]]:
        """Gateway pods with their templates, and whether they are being deleted."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        items = self.cluster.api.get(path, params={"labelSelector": "tandem.dev/gateway=front"}).json()["items"]
        return {
            one["metadata"]["name"]: (
                one["metadata"]["labels"]["pod-template-hash"],
                "deletionTimestamp" in one["metadata"],
            )
            for one in items
        }

    def events(self) -> set[tuple[str, str]]:
        items = self.cluster.get(f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")["items"]
        return {(one["type"], one["reason"]) for one in items if one["regarding"]["kind"] == "ModelGateway"}
