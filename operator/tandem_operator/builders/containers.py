"""What all pods have in common: they meet the Pod Security Standard "restricted" and get nothing they do not need, but
for what `privileges` adds where it is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem_operator.api.pods import EnvVar, PodOverrides, Resources
from tandem_operator.builders.naming import Labels, selector_of
from tandem_operator.builders.privileges import with_privileges

Manifest = dict[str, Any]

TMP = "/tmp"  # noqa: S108 - a volume of the pod, mounted there

_CONTAINERS = ("initContainers", "containers")
_LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""The end of the log of a container that failed stands in its pod's status: conditions quote it."""


def container_security() -> Manifest:
    """securityContext of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def pod_security(user: int) -> Manifest:
    """securityContext of every pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


LEAST: Mapping[str, str] = {"cpu": "250m", "memory": "512Mi"}
"""Requests of a container whose resource names neither a request nor a limit."""


def resources_of(resources: Resources, least: Mapping[str, str] = LEAST) -> Manifest:
    """Field `resources` of a container, amounts as strings as server-side apply wants them.

    Each container has requests of CPU and memory, so that schedulers and quotas count it: where `resources` names none,
    its limit, else `least`.
    """
    limits = {name: str(amount) for name, amount in resources.limits.items()}
    requests = {name: limits.get(name, amount) for name, amount in least.items()}
    requests |= {name: str(amount) for name, amount in resources.requests.items()}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def env_of(variables: Sequence[EnvVar]) -> list[Manifest]:
    """A user's environment variables."""
    return [
        {"name": one.name, "valueFrom": {"secretKeyRef": msgspec.to_builtins(one.secret_key_ref)}}
        if one.secret_key_ref is not None
        else {"name": one.name, "value": one.value}
        for one in variables
    ]


def value(name: str, text: str) -> Manifest:
    """An environment variable."""
    return {"name": name, "value": text}


def from_pod(name: str, path: str) -> Manifest:
    """An environment variable that holds a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def http_probe(path: str, port: str, **limits: int) -> Manifest:
    """A probe that asks over HTTP."""
    return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, **limits}


def container_port(name: str, number: int) -> Manifest:
    """With its protocol, which server-side apply wants as part of the key."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def scratch(name: str, path: str, *, limit: str, memory: bool = False) -> tuple[Manifest, Manifest]:
    """An empty volume of the pod and its mount: the root file system is read-only. `limit`: a pod that goes beyond it
    is evicted, so that it does not fill the node's disk.
    """
    source: Manifest = {"medium": "Memory"} if memory else {}
    source["sizeLimit"] = limit
    return {"name": name, "emptyDir": source}, {"name": name, "mountPath": path}


def secret_volume(
    name: str, secret: str, path: str, keys: Mapping[str, str] | None = None
) -> tuple[Manifest, Manifest]:
    """A Secret as read-only files for the group alone; `keys` maps its keys to file names, None takes all."""
    source: Manifest = {"secretName": secret, "defaultMode": 0o440}
    if keys is not None:
        source["items"] = [{"key": key, "path": file} for key, file in keys.items()]
    return {"name": name, "secret": source}, {"name": name, "mountPath": path, "readOnly": True}


def scratch_limit(overrides: PodOverrides, default: str) -> str:
    """Of the folder for temporary files."""
    return default if overrides.scratch_limit is None else str(overrides.scratch_limit)


def spread_apart(labels: Labels) -> list[Manifest]:
    """Topology spread of pods that should not be lost together: nodes and zones where there are several."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector_of(labels)},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def pod_template(
    *, labels: Labels, overrides: PodOverrides, spec: Manifest, annotations: Mapping[str, str] | None = None
) -> Manifest:
    """A pod template: `spec` with what every pod has, and what a user may override. Our labels win."""
    metadata: Manifest = {"labels": {**overrides.labels, **labels}}
    notes = {**overrides.annotations, **(annotations or {})}
    if notes:
        metadata["annotations"] = notes
    told = {kind: [{**_LAST_WORDS, **one} for one in spec[kind]] for kind in _CONTAINERS if kind in spec}
    pod = {**_common(), **spec, **told, **_placement(overrides, labels)}
    return {"metadata": metadata, "spec": with_privileges(pod, overrides)}


def _common() -> Manifest:
    return {
        # No pod talks to the API server, and variables of other Services would only be mistaken for settings.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
    }


def _placement(overrides: PodOverrides, labels: Labels) -> Manifest:
    spread = [
        {"labelSelector": {"matchLabels": labels}, **constraint} for constraint in overrides.topology_spread_constraints
    ]
    placement: Manifest = {
        "nodeSelector": overrides.node_selector,
        "tolerations": [msgspec.to_builtins(one) for one in overrides.tolerations],
        "affinity": overrides.affinity,
        "topologySpreadConstraints": spread,
        "priorityClassName": overrides.priority_class_name,
        "runtimeClassName": overrides.runtime_class_name,
        "schedulerName": overrides.scheduler_name,
    }
    return {key: value for key, value in placement.items() if value}
