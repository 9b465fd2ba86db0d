"""Patches of pods: what they add, and that they add no privilege [spec-grants-nothing]."""

import copy
from typing import Any

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of
from tandem_testing.pod_security import violations

NOW = "2026-01-01T00:00:00Z"
APIS = ClusterApis(leader_worker_sets=True, inference_pools=True)
BASE = {"model": {"path": "/models/m"}, "gateway": {"inferencePool": {}}, "redis": {"managed": {}}}
SIDECAR = {"name": "shipper", "image": "shipper:1"}
PARTS = {
    "prefill": "chat-prefill-",
    "decode": "chat-decode-",
    "gateway": "chat-gateway",
    "gateway.inferencePool": "chat-router",
    "redis.managed": "chat-redis",
}
"""Place of `pod` below `spec`, and how the name of its object begins."""


def spec_with(patch: dict[str, Any], place: str = "prefill", **fields: Any) -> dict[str, Any]:
    spec = {**copy.deepcopy(BASE), **fields}
    part = spec
    for word in place.split("."):
        part = part.setdefault(word, {})
    part["pod"] = {"patch": patch}
    return spec


def pod(**spec: Any) -> dict[str, Any]:
    return {"spec": spec}


def plan_of(spec: dict[str, Any], *allow: str):
    settings = OperatorSettings(apis=APIS, allow=frozenset(("routes", *allow)))
    return make_plan(service_of(spec), Observed(now=NOW), ModelServiceStatus(), 1, settings)


def templates_of(spec: dict[str, Any], *allow: str) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of their object; those of a group also by theirs."""
    found = {}
    for manifest in plan_of(spec, *allow).apply:
        name, body = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] == "Deployment":
            found[name] = body["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            found |= {
                f"{name} {kind}": body["leaderWorkerTemplate"][kind] for kind in ("leaderTemplate", "workerTemplate")
            }
    return found


def problems_of(patch: dict[str, Any], *allow: str) -> str:
    """What the status says; then nothing is applied."""
    plan = plan_of(spec_with(patch), *allow)
    (valid,) = [one for one in plan.status.conditions if one.type == "Valid"]
    assert (plan.apply == ()) == (valid.status == "False")
    return valid.message


@pytest.mark.parametrize("place", PARTS)
def test_patch_changes_the_pods_of_its_part_alone(place: str) -> None:
    patch = pod(containers=[SIDECAR], volumes=[{"name": "logs", "emptyDir": {}}], dnsPolicy="Default")
    plain, changed = templates_of(BASE), templates_of(spec_with(patch, place))
    (name,) = [one for one in changed if changed[one] != plain[one]]
    assert name.startswith(PARTS[place])
    before, after = plain[name]["spec"], changed[name]["spec"]
    *ours, sidecar = after["containers"]
    assert ours == before["containers"]
    assert sidecar["name"] == "shipper"
    assert (after["volumes"], after["dnsPolicy"]) == ([*before["volumes"], {"name": "logs", "emptyDir": {}}], "Default")
    assert violations(changed[name]) == []


def test_all_pods_of_a_group_have_the_patch() -> None:
    spec = spec_with(pod(containers=[SIDECAR]), engine={"tensorParallelSize": 2, "nodes": 2})
    names = {
        name: [one["name"] for one in template["spec"]["containers"]] for name, template in templates_of(spec).items()
    }
    patched = [name.split(" ") for name, containers in names.items() if "shipper" in containers]
    assert [kind for _, kind in patched] == ["leaderTemplate", "workerTemplate"]
    assert all(name.startswith("chat-prefill-") for name, _ in patched)


def test_our_containers_get_variables_and_mounts() -> None:
    mount = {"name": "logs", "mountPath": "/var/logs"}
    variable = {"name": "TRACE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    ours = {"name": "worker", "env": [variable], "volumeMounts": [mount]}
    spec = spec_with(pod(containers=[ours], volumes=[{"name": "logs", "emptyDir": {}}]))
    plain, changed = templates_of(BASE), templates_of(spec)
    (name,) = [one for one in changed if changed[one] != plain[one]]
    (before,), (after,) = plain[name]["spec"]["containers"], changed[name]["spec"]["containers"]
    assert after == {**before, "env": [*before["env"], variable], "volumeMounts": [*before["volumeMounts"], mount]}


def test_patch_changes_pods_within_the_revision() -> None:
    assert revision_of(service_of(spec_with(pod(containers=[SIDECAR])))) == revision_of(service_of(BASE))


def test_init_containers_come_after_those_of_the_operator_and_are_restricted() -> None:
    spec = spec_with(pod(initContainers=[SIDECAR]), engine={"args": ["--watermark=0.1"]})
    (template,) = [one for name, one in templates_of(spec).items() if name.startswith("chat-prefill")]
    assert [one["name"] for one in template["spec"]["initContainers"]] == ["check-arguments", "shipper"]
    assert violations(template) == []


def test_sidecar_may_loosen_only_what_restricted_pods_may() -> None:
    security = {"readOnlyRootFilesystem": False, "runAsUser": 1234, "runAsGroup": 1}
    ports = [{"name": "logs", "containerPort": 9999}]
    spec = spec_with(pod(containers=[{**SIDECAR, "securityContext": security, "ports": ports}]))
    (template,) = [one for name, one in templates_of(spec).items() if name.startswith("chat-prefill")]
    sidecar = template["spec"]["containers"][-1]
    assert security.items() <= sidecar["securityContext"].items()
    assert sidecar["ports"] == [{"protocol": "TCP", **ports[0]}]
    assert violations(template) == []


DENIED = [
    ({"hostNetwork": True}, "spec.hostNetwork: a patch may not set it"),
    ({"hostPID": True}, "spec.hostPID: a patch may not set it"),
    ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken: a patch may not set it"),
    ({"securityContext": {"runAsUser": 0}}, "spec.securityContext: a patch may not set it"),
    ({"terminationGracePeriodSeconds": 1}, "spec.terminationGracePeriodSeconds: a patch may not set it"),
    ({"serviceAccountName": "x"}, "has a field; remove it and set spec.prefill.pod.serviceAccountName"),
    ({"tolerations": []}, "has a field; remove it and set spec.prefill.pod.tolerations"),
    ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, "volumes[0].name: 'tmp' is another volume's"),
    ({"volumes": [{"name": "n", "nfs": {"server": "s", "path": "/"}}]}, "volumes[0].nfs: not a source"),
    (
        {"containers": [{"name": "worker", "image": "mine"}]},
        "containers[0].image: container 'worker' is the operator's",
    ),
    ({"containers": [{"name": "worker", "command": ["sh"]}]}, "containers[0].command: container 'worker'"),
    ({"containers": [{"name": "worker", "livenessProbe": {}}]}, "containers[0].livenessProbe: container 'worker'"),
    ({"containers": [{"name": "worker", "envFrom": []}]}, "containers[0].envFrom: container 'worker'"),
    ({"containers": [{"name": "worker", "env": [{"name": "TANDEM_HOST"}]}]}, "TANDEM_HOST is set elsewhere"),
    ({"containers": [{"name": "worker", "env": [{"name": "HOME"}]}]}, "HOME is set elsewhere"),
    ({"containers": [{"name": "worker", "env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}]}, "is set elsewhere"),
    (
        {"containers": [{"name": "worker", "volumeMounts": [{"name": "x", "mountPath": "/a/../tmp/x"}]}]},
        "containers[0].volumeMounts[0].mountPath: '/a/../tmp/x' is taken",
    ),
    ({"containers": [SIDECAR, SIDECAR]}, "containers[1].name: 'shipper' is given twice"),
    ({"initContainers": [{"name": "worker"}]}, "initContainers[0].name: 'worker' is the operator's"),
    ({"initContainers": [{"name": "check-arguments"}]}, "initContainers[0].name: 'check-arguments' is the operator's"),
    ({"containers": [{**SIDECAR, "ports": [{"hostPort": 80}]}]}, "ports[0].hostPort: pods have no ports of their node"),
    (
        {"containers": [{**SIDECAR, "ports": [{"name": "health"}]}]},
        "ports[0].name: 'health' is a port of",
    ),
    (
        {"containers": [{**SIDECAR, "lifecycle": {"preStop": {"httpGet": {"host": "elsewhere"}}}}]},
        "containers[0]: probes and hooks go to the pod itself",
    ),
    ({"containers": [{**SIDECAR, "readinessProbe": {"tcpSocket": {"host": "h"}}}]}, "probes and hooks go to the pod"),
    ({"containers": [{**SIDECAR, "env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}]}, "env[0].name: NVIDIA_VISIBLE_DEVICES"),
    ({"initContainers": [{**SIDECAR, "env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}]}, "is set by the device plugin"),
    ({"containers": {"name": "x"}}, "Expected `array`, got `object` - at `$.spec.containers`"),
    ({"containers": [{"image": "x"}]}, "missing required field `name` - at `$.spec.containers[0]`"),
]


@pytest.mark.parametrize(("spec", "sentence"), DENIED, ids=[sentence[:40] for _, sentence in DENIED])
def test_pod_fields_not_for_a_patch_are_named(spec: dict[str, Any], sentence: str) -> None:
    """Whatever the administrator allows."""
    for allow in ((), ("privileged", "host-paths", "service-accounts")):
        message = problems_of(pod(**spec), *allow)
        assert message.startswith("spec.prefill.pod.patch")
        assert sentence in message


PRIVILEGES = [
    ("privileged", {"containers": [{**SIDECAR, "securityContext": {name: value}}]})
    for name, value in {
        "privileged": True,
        "allowPrivilegeEscalation": True,
        "runAsUser": 0,
        "runAsNonRoot": False,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
        "seccompProfile": {"type": "Unconfined"},
        "appArmorProfile": {"type": "Unconfined"},
        "procMount": "Unmasked",
        "seLinuxOptions": {"type": "spc_t"},
        "windowsOptions": {"hostProcess": True},
    }.items()
] + [
    ("host-paths", {"volumes": [{"name": "n", "hostPath": {"path": "/"}}]}),
    ("service-accounts", {"volumes": [{"name": "n", "projected": {"sources": [{"serviceAccountToken": {}}]}}]}),
    ("service-accounts", {"volumes": [{"name": "n", "projected": {"sources": [{"podCertificate": {}}]}}]}),
]


@pytest.mark.parametrize(("privilege", "spec"), PRIVILEGES, ids=lambda one: str(one)[-40:])
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_privilege_takes_the_administrators_flag(privilege: str, spec: dict[str, Any], kind: str) -> None:
    patch = pod(**{kind if name == "containers" else name: value for name, value in spec.items()})
    assert "does not allow" in problems_of(patch)
    assert f"--allow {privilege}" in problems_of(patch)
    assert problems_of(patch, privilege) == ""


def test_metadata_of_a_patch_is_refused() -> None:
    assert "patch.metadata: a patch has spec alone" in problems_of({"metadata": {"labels": {"a": "b"}}})
