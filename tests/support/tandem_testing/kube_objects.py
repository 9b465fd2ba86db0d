"""Objects as an API server hands them out, for tests of what the operator makes of them."""

import itertools
from typing import Any

from tandem_operator.builders.naming import labels_of
from tandem_operator.controller.store import DEPLOYMENT, MODEL_SERVICE, POD, Kind, Seen

_versions = itertools.count(1)


def an_object(kind: Kind, name: str, *, owner: str = "", version: int | None = None, **fields: Any) -> Seen:
    """`fields` are parts of the body; those of `metadata` are added to it."""
    metadata = {
        "name": name,
        "namespace": "models",
        "uid": f"uid-{kind.name}-{name}",
        "resourceVersion": str(version or next(_versions)),
        **fields.pop("metadata", {}),
    }
    if owner:
        metadata["ownerReferences"] = [{"uid": owner, "controller": True, "kind": "ModelService", "name": "chat"}]
    return Seen.of({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **fields})


def a_service(name: str = "chat", **fields: Any) -> Seen:
    """A ModelService."""
    return an_object(MODEL_SERVICE, name, **{"spec": {"model": {"path": "/models/tandem-mini"}}, **fields})


def a_deployment(name: str, *, owner: str, role: str = "prefill", revision: str = "r1", **fields: Any) -> Seen:
    """One of workers of service chat."""
    labels = labels_of("chat", "worker", role=role, revision=revision)
    spec = {"replicas": 1, "selector": {"matchLabels": labels}}
    return an_object(DEPLOYMENT, name, owner=owner, metadata={"labels": labels}, **{"spec": spec, **fields})


def a_pod(name: str, *, role: str = "prefill", revision: str = "r1", ready: bool = True, **fields: Any) -> Seen:
    """A worker's pod of service chat."""
    labels = labels_of("chat", "worker", role=role, revision=revision)
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "conditions": conditions, **fields.pop("status", {})}
    metadata = {"labels": labels, **fields.pop("metadata", {})}
    return an_object(
        POD, name, owner="uid-replicaset", metadata=metadata, status=status, spec={"containers": []}, **fields
    )


def contains(stored: Any, given: Any) -> bool:
    """Whether `stored` is `given` with defaults added."""
    if isinstance(given, dict):
        return isinstance(stored, dict) and all(key in stored and contains(stored[key], given[key]) for key in given)
    if isinstance(given, list):
        return isinstance(stored, list) and len(stored) == len(given) and all(map(contains, stored, given))
    return bool(stored == given)


def lost(wanted: Any, got: Any, path: str = "") -> list[str]:
    """Paths of what was asked for and is not there; a quantity may be written in another way."""
    if isinstance(wanted, dict):
        if not isinstance(got, dict):
            return [path]
        return [one for name in wanted for one in lost(wanted[name], got.get(name), f"{path}.{name}")]
    if isinstance(wanted, list):
        if not isinstance(got, list) or len(got) != len(wanted):
            return [path]
        pairs = enumerate(zip(wanted, got, strict=True))
        return [one for number, pair in pairs for one in lost(*pair, f"{path}[{number}]")]
    return [] if wanted == got or ".resources." in path else [path]
