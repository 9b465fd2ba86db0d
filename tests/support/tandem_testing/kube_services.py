"""ModelServices in a namespace of a real control plane, as a user sees and changes them."""

from dataclasses import dataclass
from typing import Any

from tandem_testing.control_plane import PATIENCE_S, ControlPlane
from tandem_testing.waiting import wait_for

GROUP = "/apis/tandem.dev/v1beta1"
OWNED = {
    "apis/apps/v1": "deployments",
    "api/v1": "services",
    "apis/networking.k8s.io/v1": "networkpolicies",
    "apis/tandem.dev/v1beta1": "workerpools",
}


@dataclass(frozen=True)
class Services:
    """Those of one namespace."""

    cluster: ControlPlane
    namespace: str

    def apply(self, name: str = "chat", **spec: Any) -> dict[str, Any]:
        """Make or change one; the spec as a whole."""
        body = {"model": {"path": "/opt/tandem/models/tandem-mini"}, **spec}
        manifest = {
            "apiVersion": "tandem.dev/v1beta1",
            "kind": "ModelService",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": body,
        }
        made: dict[str, Any] = self.cluster.apply(manifest, force=True).raise_for_status().json()
        return made

    def path(self, name: str = "chat") -> str:
        return f"{GROUP}/namespaces/{self.namespace}/modelservices/{name}"

    def pool_path(self, role: str, name: str = "chat") -> str:
        return f"{GROUP}/namespaces/{self.namespace}/workerpools/{name}-{role}"

    def get(self, name: str = "chat") -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get(self.path(name))
        return found

    def delete(self, name: str = "chat") -> None:
        self.cluster.api.delete(self.path(name)).raise_for_status()

    def gone(self, name: str = "chat") -> bool:
        return self.cluster.api.get(self.path(name)).status_code == 404

    def condition(self, kind: str, name: str = "chat") -> tuple[str, str]:
        """Status and reason; empty before there is one."""
        conditions = self.get(name).get("status", {}).get("conditions", [])
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def wait_ready(self, name: str = "chat") -> None:
        """Until `is_settled`."""
        wait_for(lambda: self.is_settled(name), PATIENCE_S, lambda: str(self.get(name).get("status")))

    def is_settled(self, name: str = "chat") -> bool:
        """Whether the status is of the spec's generation, which is ready and has all workers of its revision.

        Deployments may still exchange pods within the revision: gateways, and workers of another template.
        """
        body = self.get(name)
        observed, generation = body.get("status", {}), body["metadata"]["generation"]
        conditions = {one["type"]: (one["status"], one["reason"]) for one in observed.get("conditions", ())}
        return (
            observed.get("observedGeneration") == generation
            and conditions.get("Ready", ("", ""))[0] == "True"
            and conditions.get("Progressing") == ("False", "Complete")
        )

    def described(self, name: str = "chat") -> str:
        """What tests wait for: its status, pods by component, objects with their owners."""
        found = self.cluster.api.get(self.path(name))
        status = found.json().get("status") if found.status_code == 200 else found.status_code
        pods = {part: self.leaving(part, name) for part in ("gateway", "worker", "redis")}
        objects = {
            f"{plural} {key}": [f"{ref['kind']} {ref['name']}" for ref in one["metadata"].get("ownerReferences", ())]
            for (plural, key), one in self.owned(name).items()
        }
        return f"status: {status}\npods, whether deleted: {pods}\nobjects, with their owners: {objects}\n"

    def wait_condition(self, kind: str, status: str, reason: str, name: str = "chat") -> None:
        wait_for(
            lambda: self.condition(kind, name) == (status, reason),
            PATIENCE_S,
            lambda: str(self.get(name).get("status")),
        )

    def deployments(self, name: str = "chat") -> dict[str, dict[str, Any]]:
        """By name."""
        return {one["metadata"]["name"]: one for one in self._list("/apis/apps/v1", "deployments", name)}

    def workers(self, role: str, name: str = "chat") -> dict[str, int]:
        """Replicas of one role's Deployments, by revision."""
        revision, mine = "tandem.dev/revision", f"{name}-{role}-"
        return {
            body["metadata"]["labels"][revision]: body["spec"]["replicas"]
            for deployment, body in self.deployments(name).items()
            if deployment.startswith(mine)
        }

    def wait_one_revision(self, name: str = "chat") -> str:
        """Until both roles have one revision, and the same; its name. Objects go before the status says so."""

        def revisions() -> list[set[str]]:
            return [set(self.workers(role, name)) for role in ("prefill", "decode")]

        wait_for(
            lambda: revisions()[0] == revisions()[1] and len(revisions()[0]) == 1,
            PATIENCE_S,
            lambda: self.described(name),
        )
        (revision,) = revisions()[0]
        return revision

    def pods(self, component: str, name: str | None = "chat") -> list[dict[str, Any]]:
        """Those of gateway, worker or redis; None: of all services."""
        found = self._list("/api/v1", "pods", name)
        return [one for one in found if one["metadata"]["labels"]["app.kubernetes.io/component"] == component]

    def fail_init(self, pod: dict[str, Any], container: dict[str, Any], ended: dict[str, Any]) -> None:
        """Write, as a kubelet, that an init container of `pod` has ended so and is started again later."""
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        failed = {"image": container["image"], "imageID": "", "ready": False, "restartCount": 1, "state": waiting}
        status = {"name": container["name"], **failed, "lastState": {"terminated": ended}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        self.cluster.merge(path, {"status": {"initContainerStatuses": [status]}}).raise_for_status()

    def leaving(self, component: str, name: str = "chat") -> dict[str, bool]:
        """Of each pod of a component, whether it is being deleted."""
        return {one["metadata"]["name"]: "deletionTimestamp" in one["metadata"] for one in self.pods(component, name)}

    def owned(self, name: str = "chat") -> dict[tuple[str, str], dict[str, Any]]:
        """All objects with the service's label, by kind and name, but pods and ReplicaSets."""
        budgets = "apis/" + self.cluster.newest("policy/v1", "policy/v1beta1")
        kinds = {**OWNED, budgets: "poddisruptionbudgets"}
        pairs = [*kinds.items(), ("api/v1", "secrets")]
        return {
            (plural, one["metadata"]["name"]): one
            for root, plural in pairs
            for one in self._list(f"/{root}", plural, name)
        }

    def events(self, name: str = "chat") -> list[tuple[str, str]]:
        """Type and reason of the service's events."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        items = self.cluster.get(path)["items"]
        return [(one["type"], one["reason"]) for one in items if one["regarding"]["name"] == name]

    def wait_event(self, kind: str, reason: str, name: str = "chat") -> None:
        """Events are posted after the status that they tell of."""
        wait_for(lambda: (kind, reason) in self.events(name), PATIENCE_S, lambda: str(self.events(name)))

    def _list(self, root: str, plural: str, name: str | None) -> list[dict[str, Any]]:
        label = "tandem.dev/service" if name is None else f"tandem.dev/service={name}"
        path = f"{root}/namespaces/{self.namespace}/{plural}"
        answer = self.cluster.api.get(path, params={"labelSelector": label})
        items: list[dict[str, Any]] = answer.raise_for_status().json()["items"]
        return items
