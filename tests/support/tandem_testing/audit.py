"""What accounts have asked of the API server: its audit log, which `tools/kube` has it write for service accounts."""

import json
from dataclasses import dataclass
from pathlib import Path

AUDIT_LOG = "audit.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request."""

    resource: str
    """With its subresource and group, as rights are written: deployments/scale.apps."""
    verb: str
    namespace: str
    name: str
    status: int
    forbidden: bool
    """By the account's rights. A namespace that is being deleted answers 403 too."""


def asked_by(account: str, run: Path) -> list[Asked]:
    """Requests about resources of system:serviceaccount:NAMESPACE:NAME, in order. `run`: the control plane's folder."""
    events = [json.loads(line) for line in (run / AUDIT_LOG).read_text().splitlines()]
    return [
        Asked(
            resource=_resource(event["objectRef"]),
            verb=event["verb"],
            namespace=event["objectRef"].get("namespace", ""),
            name=event["objectRef"].get("name", ""),
            status=event["responseStatus"]["code"],
            forbidden=event["annotations"]["authorization.k8s.io/decision"] == "forbid",
        )
        for event in events
        if event["user"]["username"] == account and "resource" in event.get("objectRef", {})
    ]


def _resource(reference: dict[str, str]) -> str:
    subresource, group = reference.get("subresource"), reference.get("apiGroup")
    return reference["resource"] + (f"/{subresource}" if subresource else "") + (f".{group}" if group else "")
