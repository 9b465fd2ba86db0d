"""Parts that all pods share, and the privileges that a resource may add.

Pods satisfy the Pod Security Standard "restricted" and have nothing that they do not need. `with_privileges` adds more
only if a resource requests it and the operator's administrator has allowed it (`tandem-operator --allow`)
[spec-grants-nothing].

Any user with permission to write ModelServices then has that privilege for all of their pods: files of a node, the
permissions of a ServiceAccount, or the node itself. The namespace must admit such pods, too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from posixpath import normpath
from typing import Any

import msgspec

from tandem_operator.api.pods import EnvVar, HostPath, PodOverrides, Resources
from tandem_operator.builders.naming import Labels, selector_of
from tandem_operator.settings import POD_PRIVILEGES, PodPrivilege

Manifest = dict[str, Any]

FIELDS: dict[PodPrivilege, str] = {
    "service-accounts": "serviceAccountName",
    "host-paths": "hostPaths",
    "privileged": "privileged",
}
"""The field of `pod` that requests each."""


def privileges_of(overrides: PodOverrides) -> list[PodPrivilege]:
    """What these pods ask for."""
    asked: dict[PodPrivilege, bool] = {
        "service-accounts": overrides.service_account_name is not None,
        "host-paths": bool(overrides.host_paths),
        "privileged": overrides.privileged is True,
    }
    return [name for name in POD_PRIVILEGES if asked[name]]


def with_privileges(pod: Manifest, overrides: PodOverrides) -> Manifest:
    """The spec of a pod with what `overrides` ask for; main containers alone, init containers stay as they are."""
    if not privileges_of(overrides):
        return pod
    mounts = [_mount(number, one) for number, one in enumerate(overrides.host_paths)]
    containers = [_raised(one, mounts, privileged=overrides.privileged is True) for one in pod["containers"]]
    volumes = [_volume(number, one) for number, one in enumerate(overrides.host_paths)]
    raised = {**pod, "containers": containers, "volumes": [*pod.get("volumes", ()), *volumes]}
    if overrides.service_account_name is not None:
        # The older field is filled in by the API server, and would bring the account back when it is taken out.
        raised |= dict.fromkeys(("serviceAccountName", "serviceAccount"), overrides.service_account_name)
    return raised


def _raised(container: Manifest, mounts: list[Manifest], *, privileged: bool) -> Manifest:
    raised = {**container, "volumeMounts": [*container.get("volumeMounts", ()), *mounts]}
    if privileged:
        # Capabilities of a container count for root alone.
        raised["securityContext"] = {
            "privileged": True,
            "allowPrivilegeEscalation": True,
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "readOnlyRootFilesystem": True,
        }
    return raised


def _volume(number: int, wanted: HostPath) -> Manifest:
    return {"name": _name(number), "hostPath": {"path": wanted.path, "type": "Directory"}}


def _mount(number: int, wanted: HostPath) -> Manifest:
    # An API server leaves out what is false.
    return {"name": _name(number), "mountPath": wanted.mount_path, **({"readOnly": True} if wanted.read_only else {})}


def _name(number: int) -> str:
    return f"host-{number}"


def host_path_problems(place: str, wanted: Sequence[HostPath], template: Manifest) -> Iterator[str]:
    """One sentence for each host path that cannot be mounted in `template`, which has them. `place`: of the list.

    API servers refuse only two mounts of one spelling, and only when they get the pod: of `/kv` and `/kv/` one would
    cover the other.
    """
    names = {_name(number) for number in range(len(wanted))}
    mounts = (mount for one in template["spec"]["containers"] for mount in one.get("volumeMounts", ()))
    ours = {mount["mountPath"]: mount for mount in mounts if mount["name"] not in names}
    taken: set[str] = set()
    for number, one in enumerate(wanted):
        # Of two slashes at the beginning, normpath keeps both.
        field, folder = f"{place}[{number}].mountPath", normpath(f"/{one.mount_path.lstrip('/')}")
        above = next((path for path in ours if folder.startswith(f"{path}/") and ours[path].get("readOnly")), None)
        if folder == "/":
            yield f"{field}: '/' is the root of the container; choose a folder"
        elif folder in ours:
            volume = ours[folder]["name"]
            yield f"{field}: {one.mount_path!r} is the operator's (volume {volume}); choose another folder"
        elif above is not None:
            yield f"{field}: {one.mount_path!r} is within {above!r}, which is read-only; choose another folder"
        elif folder in taken:
            yield f"{field}: {one.mount_path!r} is another one's already; give each its own"
        taken.add(folder)


TMP = "/tmp"  # noqa: S108 - a volume of the pod, mounted there
_CONTAINERS = ("initContainers", "containers")

LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
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
    """Field `resources` of a container, amounts as strings as server-side apply requires them.

    Each container has requests of CPU and memory, so that schedulers and quotas count it: where `resources` names none,
    its limit, else `least`.
    """
    limits = {name: str(amount) for name, amount in resources.limits.items()}
    requests = {name: limits.get(name, amount) for name, amount in least.items()}
    requests |= {name: str(amount) for name, amount in resources.requests.items()}
    return {"requests": requests, **({"limits": limits} if limits else {})}


_PLAIN = frozenset({"cpu", "memory", "ephemeral-storage"})
_HUGE_PAGES = re.compile(r"hugepages-([1-9][0-9]*(?:k|Ki|M|Mi|G|Gi|T|Ti)?)")


def resource_problems(place: str, resources: Resources) -> Iterator[str]:
    """One sentence for each amount of `resources` that the API server would refuse in a container. `place`: its field.

    Keys of a map are beyond what the schema of a custom resource can constrain.
    """
    for kind, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            field, unit = f"{place}.{kind}[{name}]", _unit_of(name)
            if unit is None:
                yield (
                    f"{field}: containers have no such resource; use cpu, memory, ephemeral-storage, hugepages-SIZE or "
                    f"that of a device plugin with its domain, such as nvidia.com/gpu"
                )
            elif unit and parse_quantity(amount) % unit:
                yield f"{field}: {amount} is no multiple of {name.removeprefix('hugepages-') if unit > 1 else 1}"
    for name, least in resources.requests.items():
        field, most = f"{place}.requests[{name}]", resources.limits.get(name)
        if _unit_of(name) and (most is None or parse_quantity(least) != parse_quantity(most)):
            yield f"{field}: {least} needs an equal limit; set {place}.limits[{name}] to it, or remove the request"
        elif most is not None and parse_quantity(least) > parse_quantity(most):
            yield f"{field}: {least} is above its limit {most}; raise the limit"


def _unit_of(resource: str) -> Decimal | None:
    """What amounts are multiples of, if they cannot be overcommitted; 0 for CPU and memory. None: no such resource."""
    pages = _HUGE_PAGES.fullmatch(resource)
    if pages is not None:
        return parse_quantity(pages[1])
    domain, slash, _ = resource.partition("/")
    if not slash:
        return Decimal(0) if resource in _PLAIN else None
    return None if domain.startswith("requests.") or domain.endswith("kubernetes.io") else Decimal(1)


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
    """A probe over HTTP."""
    return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, **limits}


def container_port(name: str, number: int) -> Manifest:
    """With its protocol, which server-side apply requires as part of the key."""
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
    reporting = {kind: [{**LAST_WORDS, **one} for one in spec[kind]] for kind in _CONTAINERS if kind in spec}
    pod = {**_common(), **spec, **reporting, **_placement(overrides, labels)}
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


_FACTORS = {
    "": Decimal(1),
    "m": Decimal(1) / 1000,
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")


def parse_quantity(text: int | str) -> Decimal:
    """The number that `text` stands for: bytes, cores, devices. Raises `ValueError` when it is no quantity."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is no quantity: write it like 2, 500m or 16Gi")
    return Decimal(match[1]) * _FACTORS[match[2]]
