"""`pod.patch`: a partial pod template of a user, merged into one of the operator's by names.

    containers         a new name is a side-car; to a container of the operator, variables and mounts are added
    initContainers     new names alone, after those of the operator
    volumes            new names alone
    others of SET      as given

Anything else is refused by name, because it has a field in the spec or is the operator's. The result has no privilege
that the pod did not have [spec-grants-nothing]: added containers are as restricted as the operator's own, unless its
administrator allows more. What these rules do not know is judged by the API server in the dry run of the plan.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from posixpath import normpath
from typing import Any

import msgspec

from tandem_operator.api.pods import PodOverrides
from tandem_operator.builders.arguments import CHECK
from tandem_operator.builders.containers import LAST_WORDS, Manifest, container_security
from tandem_operator.builders.naming import ROLE_LABEL, Labels
from tandem_operator.builders.served import Served
from tandem_operator.settings import Privilege

LISTS = ("containers", "initContainers", "volumes")
SET = ("hostAliases", "dnsPolicy", "dnsConfig", "resourceClaims")
FIELDS = {
    "nodeSelector": "pod.nodeSelector",
    "tolerations": "pod.tolerations",
    "affinity": "pod.affinity",
    "topologySpreadConstraints": "pod.topologySpreadConstraints",
    "priorityClassName": "pod.priorityClassName",
    "runtimeClassName": "pod.runtimeClassName",
    "schedulerName": "pod.schedulerName",
    "serviceAccountName": "pod.serviceAccountName",
}
"""Of a pod, and the field that sets each."""

EXTENDED = ("env", "volumeMounts")
"""What a patch adds to a container of the operator."""

VOLUMES = frozenset(
    "configMap csi downwardAPI emptyDir ephemeral image persistentVolumeClaim projected secret hostPath".split()
)

DEVICES = "NVIDIA_VISIBLE_DEVICES"
"""It would show a container GPUs of its node that it was not given."""

PROJECTED = frozenset("configMap secret downwardAPI clusterTrustBundle".split())
"""Sources that give a pod no identity."""

SECURITY: Mapping[str, Callable[[Any], bool]] = {
    "runAsUser": lambda user: user != 0,
    "runAsGroup": lambda _: True,
    "runAsNonRoot": lambda wanted: wanted is True,
    "readOnlyRootFilesystem": lambda _: True,
    "allowPrivilegeEscalation": lambda wanted: wanted is False,
    "capabilities": lambda given: given == {"drop": ["ALL"]},
    "seccompProfile": lambda given: given == {"type": "RuntimeDefault"},
}
"""What an added container may set of its securityContext without a privilege, and which values."""


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    """Fields that a rule reads; the API server judges the others."""


class _Port(_Part, frozen=True):
    name: str = ""
    host_port: int | None = None


class _Mount(_Part, frozen=True):
    name: str
    mount_path: str


class _Variable(_Part, frozen=True):
    name: str


class _Action(_Part, frozen=True):
    host: str | None = None


class _Handler(_Part, frozen=True):
    http_get: _Action | None = None
    tcp_socket: _Action | None = None


class _Lifecycle(_Part, frozen=True):
    post_start: _Handler | None = None
    pre_stop: _Handler | None = None


class _Container(_Part, frozen=True):
    name: str
    env: list[_Variable] = []
    volume_mounts: list[_Mount] = []
    ports: list[_Port] = []
    security_context: dict[str, Any] = {}
    liveness_probe: _Handler | None = None
    readiness_probe: _Handler | None = None
    startup_probe: _Handler | None = None
    lifecycle: _Lifecycle | None = None

    def actions(self) -> Iterator[_Action | None]:
        hooks = [] if self.lifecycle is None else [self.lifecycle.post_start, self.lifecycle.pre_stop]
        for handler in (self.liveness_probe, self.readiness_probe, self.startup_probe, *hooks):
            if handler is not None:
                yield from (handler.http_get, handler.tcp_socket)


class _Projected(_Part, frozen=True):
    sources: list[dict[str, Any]] = []


class _Volume(_Part, frozen=True):
    name: str
    projected: _Projected | None = None


class _Pod(_Part, frozen=True):
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    volumes: list[_Volume] = []


class _Template(_Part, frozen=True):
    spec: _Pod = _Pod()


_PLACES = {"gateway": "gateway", "router": "gateway.inferencePool", "redis": "redis.managed"}


def overrides_of(service: Served, labels: Labels) -> tuple[str, PodOverrides]:
    """Place of what a spec says of pods with these labels, and that; nothing for objects without pods of their own."""
    spec = service.spec
    for role, part in (("prefill", spec.prefill), ("decode", spec.decode)):
        if labels.get(ROLE_LABEL) == role:
            return f"spec.{role}.pod", part.pod
    place = _PLACES.get(labels.get("app.kubernetes.io/component", ""), "")
    pool, redis = spec.gateway.inference_pool, spec.redis.managed
    overrides = {
        "gateway": spec.gateway.pod,
        "gateway.inferencePool": PodOverrides() if pool is None else pool.pod,
        "redis.managed": PodOverrides() if redis is None else redis.pod,
    }
    return f"spec.{place}.pod", overrides.get(place, PodOverrides())


def with_templates(manifest: Manifest, change: Callable[[Manifest], Manifest]) -> Manifest:
    """A Deployment or a LeaderWorkerSet with its pod templates changed; other objects as they are."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Deployment":
        return {**manifest, "spec": {**spec, "template": change(spec["template"])}}
    if manifest["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        changed = {name: change(group[name]) for name in ("leaderTemplate", "workerTemplate")}
        return {**manifest, "spec": {**spec, "leaderWorkerTemplate": {**group, **changed}}}
    return manifest


def with_patch(template: Manifest, patch: Mapping[str, Any]) -> Manifest:
    """`template` with a patch without problems."""
    pod, added = template["spec"], patch.get("spec", {})
    ours = {one["name"] for one in pod["containers"]}
    extensions = {one["name"]: one for one in added.get("containers", ()) if one["name"] in ours}
    sidecars = [_restricted(one) for one in added.get("containers", ()) if one["name"] not in ours]
    merged = {**pod, **{name: added[name] for name in SET if name in added}}
    merged["containers"] = [*(_extended(one, extensions.get(one["name"], {})) for one in pod["containers"]), *sidecars]
    if added.get("initContainers"):
        merged["initContainers"] = [*pod.get("initContainers", ()), *map(_restricted, added["initContainers"])]
    if added.get("volumes"):
        merged["volumes"] = [*pod.get("volumes", ()), *added["volumes"]]
    return {**template, "spec": merged}


def _extended(container: Manifest, extension: Mapping[str, Any]) -> Manifest:
    more = {name: [*container.get(name, ()), *extension[name]] for name in EXTENDED if name in extension}
    return {**container, **more}


def _restricted(container: Manifest) -> Manifest:
    security = {**container_security(), **container.get("securityContext", {})}
    built = {**LAST_WORDS, **container, "securityContext": security}
    if "ports" in container:
        # Server-side apply requires the protocol as part of the key.
        built["ports"] = [{"protocol": "TCP", **port} for port in container["ports"]]
    return built


def patch_problems(place: str, patch: Mapping[str, Any], template: Manifest, allow: Set[Privilege]) -> Iterator[str]:
    """One sentence for each part of a patch that `template` cannot have. `allow`: what the administrator allows."""
    try:
        wanted = msgspec.convert(patch, _Template).spec
    except msgspec.ValidationError as error:
        yield f"{place}: {error}; write it as in a pod template"
        return
    given = patch.get("spec", {})
    for name in sorted(patch.keys() - {"spec"}):
        yield f"{place}.{name}: a patch has spec alone; remove it (pod.labels and pod.annotations are fields)"
    yield from _fields(place, given)
    pod = template["spec"]
    yield from _volumes(place, wanted, given, pod, allow)
    ours = {one["name"]: one for one in pod["containers"]}
    reserved = {CHECK, *ours, *(one["name"] for one in pod.get("initContainers", ()))}
    ports = {port.get("name") for one in pod["containers"] for port in one.get("ports", ())}
    seen: set[str] = set()
    for kind, containers in (("containers", wanted.containers), ("initContainers", wanted.init_containers)):
        for number, one in enumerate(containers):
            path = f"{place}.spec.{kind}[{number}]"
            if one.name in seen:
                yield f"{path}.name: {one.name!r} is given twice; give each its own"
            seen.add(one.name)
            if kind == "containers" and one.name in ours:
                yield from _additions(path, one, given[kind][number], ours[one.name])
            elif one.name in reserved:
                yield f"{path}.name: {one.name!r} is the operator's; give it another name"
            else:
                yield from _sidecar(path, one, ports, allow)


def _fields(place: str, given: Mapping[str, Any]) -> Iterator[str]:
    for name in given:
        if name in FIELDS:
            yield f"{place}.spec.{name}: has a field; remove it and set {place.removesuffix('pod.patch')}{FIELDS[name]}"
        elif name not in LISTS and name not in SET:
            yield f"{place}.spec.{name}: a patch may not set it; remove it ({', '.join((*LISTS, *SET))} may be set)"


def _volumes(place: str, wanted: _Pod, given: Mapping[str, Any], pod: Manifest, allow: Set[Privilege]) -> Iterator[str]:
    taken = {one["name"] for one in pod.get("volumes", ())}
    for number, one in enumerate(wanted.volumes):
        path = f"{place}.spec.volumes[{number}]"
        if one.name in taken:
            yield f"{path}.name: {one.name!r} is another volume's; give each its own"
        taken.add(one.name)
        for source in sorted(given["volumes"][number].keys() - {"name"}):
            if source not in VOLUMES:
                yield f"{path}.{source}: not a source that a patch may have; use one of {', '.join(sorted(VOLUMES))}"
        if "hostPath" in given["volumes"][number]:
            yield from _denied(f"{path}.hostPath", "host-paths", allow)
        if any(source.keys() - PROJECTED for source in (one.projected or _Projected()).sources):
            yield from _denied(f"{path}.projected.sources", "service-accounts", allow)


def _denied(path: str, privilege: Privilege, allow: Set[Privilege]) -> Iterator[str]:
    if privilege not in allow:
        yield (
            f"{path}: this operator does not allow {privilege}; remove it, or start the operator with "
            f"--allow {privilege}"
        )


def _additions(path: str, one: _Container, given: Mapping[str, Any], ours: Manifest) -> Iterator[str]:
    for name in sorted(given.keys() - {"name", *EXTENDED}):
        yield f"{path}.{name}: container {one.name!r} is the operator's, a patch adds env and volumeMounts to it alone"
    taken = {variable["name"] for variable in ours.get("env", ())}
    for number, variable in enumerate(one.env):
        if variable.name.startswith("TANDEM_") or variable.name in {DEVICES, *taken}:
            yield f"{path}.env[{number}].name: {variable.name} is set elsewhere; remove it"
        taken.add(variable.name)
    folders = [mount["mountPath"] for mount in ours.get("volumeMounts", ())]
    for number, mount in enumerate(one.volume_mounts):
        if _within(mount.mount_path, folders):
            yield f"{path}.volumeMounts[{number}].mountPath: {mount.mount_path!r} is taken; choose another folder"
        folders.append(mount.mount_path)


def _within(path: str, folders: Iterable[str]) -> bool:
    """Whether a mount there would replace one of `folders`, or a part of it."""
    whole = f"{normpath('/' + path.lstrip('/')).rstrip('/')}/"
    return any(whole.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _sidecar(path: str, one: _Container, ports: Set[str | None], allow: Set[Privilege]) -> Iterator[str]:
    for number, variable in enumerate(one.env):
        if variable.name == DEVICES:
            yield f"{path}.env[{number}].name: {DEVICES} is set by the device plugin; remove it"
    for number, port in enumerate(one.ports):
        if port.host_port is not None:
            yield f"{path}.ports[{number}].hostPort: pods have no ports of their node; remove it"
        if port.name and port.name in ports:
            yield f"{path}.ports[{number}].name: {port.name!r} is a port of the operator's container; rename it"
    if any(action is not None and action.host for action in one.actions()):
        yield f"{path}: probes and hooks go to the pod itself; remove their host"
    if "privileged" in allow:
        return
    for name, given in one.security_context.items():
        if name not in SECURITY or not SECURITY[name](given):
            yield (
                f"{path}.securityContext.{name}: this operator does not allow {name} {given!r}; remove it, or start "
                "the operator with --allow privileged"
            )
