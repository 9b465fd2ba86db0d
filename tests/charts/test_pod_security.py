"""The checker of the Pod Security Standard "restricted": one pod for each of its rules."""

import copy
from typing import Any

import pytest

from tandem_testing.pod_security import violations

ADMITTED: dict[str, Any] = {
    "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/main": "runtime/default"}},
    "spec": {
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}],
        },
        "initContainers": [
            {
                "name": "first",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "containers": [
            {
                "name": "main",
                "ports": [{"containerPort": 80}],
                "livenessProbe": {"httpGet": {"path": "/live", "port": 80}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
                },
            }
        ],
        "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "image": {"reference": "x:1"}}],
    },
}
POD, MAIN, FIRST = ("spec", "securityContext"), ("spec", "containers", 0), ("spec", "initContainers", 0)
OWN = (*MAIN, "securityContext")

REFUSED = [
    (("spec", "hostNetwork"), True, "spec.hostNetwork"),
    (("spec", "hostPID"), True, "spec.hostPID"),
    (("spec", "hostIPC"), True, "spec.hostIPC"),
    (("spec", "volumes", 0), {"name": "a", "hostPath": {"path": "/"}}, "spec.volumes[a].hostPath"),
    (("spec", "volumes", 0), {"name": "a", "nfs": {"server": "s", "path": "/"}}, "spec.volumes[a].nfs"),
    ((*POD, "sysctls", 0, "name"), "kernel.msgmax", "spec.securityContext.sysctls[kernel.msgmax]"),
    ((*POD, "windowsOptions"), {"hostProcess": True}, "spec.securityContext.windowsOptions.hostProcess"),
    ((*POD, "seLinuxOptions"), {"type": "spc_t"}, "spec.securityContext.seLinuxOptions"),
    ((*POD, "seLinuxOptions"), {"role": "sysadm_r"}, "spec.securityContext.seLinuxOptions"),
    ((*POD, "appArmorProfile"), {"type": "Unconfined"}, "spec.securityContext.appArmorProfile"),
    ((*POD, "seccompProfile"), {"type": "Unconfined"}, "spec.securityContext.seccompProfile"),
    ((*POD, "runAsUser"), 0, "spec.securityContext.runAsUser"),
    ((*POD, "runAsNonRoot"), False, "spec.securityContext.runAsNonRoot"),
    (
        ("metadata", "annotations", "container.apparmor.security.beta.kubernetes.io/main"),
        "unconfined",
        "metadata.annotations[container.apparmor.security.beta.kubernetes.io/main]",
    ),
    ((*OWN, "privileged"), True, "spec.containers[main].securityContext.privileged"),
    ((*OWN, "allowPrivilegeEscalation"), True, "spec.containers[main].securityContext.allowPrivilegeEscalation"),
    ((*OWN, "procMount"), "Unmasked", "spec.containers[main].securityContext.procMount"),
    ((*OWN, "capabilities", "drop"), ["NET_RAW"], "spec.containers[main].securityContext.capabilities.drop"),
    ((*OWN, "capabilities", "add"), ["SYS_PTRACE"], "spec.containers[main].securityContext.capabilities.add"),
    ((*OWN, "runAsUser"), 0, "spec.containers[main].securityContext.runAsUser"),
    ((*OWN, "runAsNonRoot"), False, "spec.containers[main].securityContext.runAsNonRoot"),
    ((*OWN, "seccompProfile"), {"type": "Unconfined"}, "spec.containers[main].securityContext.seccompProfile"),
    ((*OWN, "seLinuxOptions"), {"user": "system_u"}, "spec.containers[main].securityContext.seLinuxOptions"),
    ((*MAIN, "ports", 0, "hostPort"), 80, "spec.containers[main].ports"),
    ((*MAIN, "livenessProbe", "httpGet", "host"), "10.0.0.1", "spec.containers[main].livenessProbe.httpGet.host"),
    (
        (*MAIN, "lifecycle"),
        {"preStop": {"tcpSocket": {"host": "db", "port": 1}}},
        "spec.containers[main].lifecycle.preStop.tcpSocket.host",
    ),
    ((*FIRST, "securityContext"), {}, "spec.initContainers[first].securityContext.allowPrivilegeEscalation"),
]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    template = copy.deepcopy(ADMITTED)
    part: Any = template
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return template


def test_pod_that_keeps_every_rule_is_admitted():
    assert violations(ADMITTED) == []


@pytest.mark.parametrize(
    ("path", "value", "refused"), REFUSED, ids=[f"{number}-{one[2]}" for number, one in enumerate(REFUSED)]
)
def test_each_rule_refuses(path, value, refused):
    assert refused in {one.partition(": ")[0] for one in violations(changed(path, value))}


@pytest.mark.parametrize("field", ["runAsNonRoot", "seccompProfile"])
def test_setting_absent_from_pod_and_container_is_missing(field):
    template = copy.deepcopy(ADMITTED)
    del template["spec"]["securityContext"][field]
    found = {one.partition(": ")[0] for one in violations(template)}
    assert found == {
        f"spec.initContainers[first].securityContext.{field}",
        f"spec.containers[main].securityContext.{field}",
    }


def test_bare_pod_is_refused():
    assert violations({"spec": {"containers": [{"name": "main"}]}})
