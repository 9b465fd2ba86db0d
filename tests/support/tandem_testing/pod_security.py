"""The Pod Security Standard "restricted", the whole of it: what a namespace with that label would refuse.

Source: kubernetes.io/docs/concepts/security/pod-security-standards, and the API server's own checks where the page is
behind them (image volumes are allowed since 1.33, hosts of probes refused since 1.34). What Windows may is left out.
"""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
SECCOMP = {"RuntimeDefault", "Localhost"}


def violations(template: Json) -> list[str]:
    """What "restricted" refuses of a pod or pod template, `PATH: why` each; empty when it admits it."""
    pod = template["spec"]
    security = pod.get("securityContext", {})
    found = [*_host(pod), *_volumes(pod), *_contexts("spec", security), *_sysctls(security)]
    found += _annotations(template.get("metadata", {}).get("annotations", {}))
    for path, container in containers_of(pod):
        found += _container(path, container, security)
    return found


def containers_of(pod: Json) -> Iterator[tuple[str, Json]]:
    """Every container of a pod spec with where it stands."""
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod.get(kind, []):
            yield f"spec.{kind}[{container['name']}]", container


def _host(pod: Json) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"spec.{field}: host namespaces"


def _volumes(pod: Json) -> Iterator[str]:
    for volume in pod.get("volumes", []):
        for source in volume.keys() - {"name"} - VOLUMES:
            yield f"spec.volumes[{volume['name']}].{source}: volume type"


def _sysctls(security: Json) -> Iterator[str]:
    for sysctl in security.get("sysctls", []):
        if sysctl["name"] not in SYSCTLS:
            yield f"spec.securityContext.sysctls[{sysctl['name']}]: unsafe sysctl"


def _annotations(annotations: Json) -> Iterator[str]:
    for key, profile in annotations.items():
        allowed = profile in ("", "runtime/default") or profile.startswith("localhost/")
        if key.startswith(APPARMOR_ANNOTATION) and not allowed:
            yield f"metadata.annotations[{key}]: AppArmor profile"


def _contexts(path: str, security: Json) -> Iterator[str]:
    """What pods and containers say alike."""
    path = f"{path}.securityContext"
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess: host process"
    selinux = security.get("seLinuxOptions", {})
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{path}.seLinuxOptions: SELinux"
    if security.get("appArmorProfile", {}).get("type") not in {None, *SECCOMP}:
        yield f"{path}.appArmorProfile: AppArmor profile"
    if security.get("seccompProfile", {}).get("type") not in {None, *SECCOMP}:
        yield f"{path}.seccompProfile: seccomp"
    if security.get("runAsUser") == 0:
        yield f"{path}.runAsUser: root"
    if security.get("runAsNonRoot") is False:
        yield f"{path}.runAsNonRoot: root"


def _container(path: str, container: Json, of_pod: Json) -> Iterator[str]:
    security = container.get("securityContext", {})
    yield from _contexts(path, security)
    if security.get("privileged"):
        yield f"{path}.securityContext.privileged: privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{path}.securityContext.allowPrivilegeEscalation: must be false"
    if security.get("procMount", "Default") != "Default":
        yield f"{path}.securityContext.procMount: must be Default"
    capabilities = security.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield f"{path}.securityContext.capabilities.drop: must have ALL"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{path}.securityContext.capabilities.add: only NET_BIND_SERVICE"
    if not security.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield f"{path}.securityContext.runAsNonRoot: must be true, here or in the pod"
    if not (security.get("seccompProfile") or of_pod.get("seccompProfile")):
        yield f"{path}.securityContext.seccompProfile: must be set, here or in the pod"
    yield from (f"{path}.ports: host port" for port in container.get("ports", []) if port.get("hostPort"))
    yield from _handlers(path, container)


def _handlers(path: str, container: Json) -> Iterator[str]:
    """Probes and hooks may not be sent to another host."""
    handlers = {name: container.get(name, {}) for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    handlers |= {f"lifecycle.{name}": hook for name, hook in container.get("lifecycle", {}).items()}
    for name, handler in handlers.items():
        for action in ("httpGet", "tcpSocket"):
            if handler.get(action, {}).get("host"):
                yield f"{path}.{name}.{action}.host: another host"
