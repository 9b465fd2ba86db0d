"""A pod of a ModelService as the operator sees it: enough to talk to it, and to choose among its like."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem_engine.addresses import Address
from tandem_operator.api.roles import RoleName
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL

PodRole = Literal["prefill", "decode", "gateway"]

COMPONENT_LABEL = "app.kubernetes.io/component"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation: of the pods of one ReplicaSet the cheapest go first."""

ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSeen:
    """One pod that has not ended."""

    name: str
    """A worker's is its name in the registry, too."""
    uid: str
    ip: str
    """Empty until it has one."""
    role: PodRole
    """Of its Deployment. What a worker serves as may have been flipped since: that is in its metrics alone."""
    revision: str = ""
    """Of a worker."""
    ready: bool = False
    standby: bool = False
    """A worker that would be ready if its revision had been tried (`telemetry.standby`)."""
    terminating: bool = False
    ports: Mapping[str, int] = field(default_factory=dict)
    """By the names that its containers give them."""
    deletion_cost: int = 0

    @staticmethod
    def of(pod: Mapping[str, Any]) -> "PodSeen | None":
        """From the API's own JSON. None for pods that have ended, and for those that are neither worker nor gateway."""
        metadata, status = pod["metadata"], pod.get("status", {})
        role = _role(metadata.get("labels", {}))
        if role is None or status.get("phase") in ENDED:
            return None
        return PodSeen(
            name=metadata["name"],
            uid=metadata["uid"],
            ip=status.get("podIP", ""),
            role=role,
            revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
            ready=any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ())),
            terminating=metadata.get("deletionTimestamp") is not None,
            ports=_ports(pod.get("spec", {})),
            deletion_cost=_deletion_cost(metadata.get("annotations", {})),
        )

    @property
    def usable(self) -> bool:
        """Whether a canary can go through it."""
        return (self.ready or self.standby) and not self.terminating

    @property
    def worker_role(self) -> RoleName | None:
        """None of a gateway."""
        return None if self.role == "gateway" else self.role

    def url(self, port: str, path: str) -> str | None:
        """http:// address of `path` at the port of that name; None while it cannot be asked."""
        number = self.ports.get(port)
        if not self.ip or number is None:
            return None
        return Address(self.ip, number).url(path)


def _role(labels: Mapping[str, str]) -> PodRole | None:
    match labels.get(COMPONENT_LABEL), labels.get(ROLE_LABEL):
        case "gateway", _:
            return "gateway"
        case "worker", "prefill":
            return "prefill"
        case "worker", "decode":
            return "decode"
    return None


def _ports(spec: Mapping[str, Any]) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in spec.get("containers", ())
        for port in container.get("ports", ())
        if "name" in port
    }


def _deletion_cost(annotations: Mapping[str, str]) -> int:
    try:
        return int(annotations.get(DELETION_COST, "0"))
    except ValueError:
        # Somebody else's; the ReplicaSet controller takes it for 0 as well.
        return 0
