"""What pods get beyond the Pod Security Standard "restricted": nothing, unless a resource asks for it and the
operator's administrator has allowed it (`tandem-operator --allow`) [spec-grants-nothing].

Who may write ModelServices has it then, for every pod of theirs: a node's files, the rights of a ServiceAccount, or
the node itself. The namespace has to admit such pods, too.
"""

from typing import Any

from tandem_operator.api.pods import HostPath, PodOverrides
from tandem_operator.settings import POD_PRIVILEGES, PodPrivilege

Manifest = dict[str, Any]

FIELDS: dict[PodPrivilege, str] = {
    "service-accounts": "serviceAccountName",
    "host-paths": "hostPaths",
    "privileged": "privileged",
}
"""By which field of `pod` each is asked for."""


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
    return {"name": _name(number), "mountPath": wanted.mount_path, "readOnly": wanted.read_only}


def _name(number: int) -> str:
    return f"host-{number}"
