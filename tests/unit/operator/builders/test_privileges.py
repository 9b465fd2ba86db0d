"""What pods may have beyond "restricted": nothing, unless resource and administrator both say so
[spec-grants-nothing]."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import Plan, make_plan
from tandem_operator.settings import POD_PRIVILEGES, PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of
from tandem_testing.pod_security import violations

EXAMPLE = Path(__file__).parents[4] / "examples" / "node-local.yaml"
ASKED: dict[str, dict[str, Any]] = {
    "service-accounts": {"serviceAccountName": "admin"},
    "host-paths": {"hostPaths": [{"path": "/mnt/models", "mountPath": "/nvme"}]},
    "privileged": {"privileged": True},
}
EVERYTHING = {field: value for one in ASKED.values() for field, value in one.items()}
PARTS = {
    "prefill": lambda pod: {"prefill": {"pod": pod}},
    "decode": lambda pod: {"decode": {"pod": pod}},
    "gateway": lambda pod: {"gateway": {"pod": pod}},
    "gateway.inferencePool": lambda pod: {"gateway": {"inferencePool": {"pod": pod}}},
    "redis.managed": lambda pod: {"redis": {"managed": {"pod": pod}}},
}
WORKLOADS = {
    "prefill": "prefill-",
    "decode": "decode-",
    "gateway": "gateway",
    "gateway.inferencePool": "router",
    "redis.managed": "redis",
}


def plan_of(spec: dict[str, Any], *allow: Any) -> Plan:
    apis = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True, leader_worker_sets=True)
    settings = OperatorSettings(apis=apis, allow=frozenset(allow))
    return make_plan(service_of(**spec), Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)


def pods_of(plan: Plan) -> dict[str, dict[str, Any]]:
    made = {one["metadata"]["name"]: one for one in plan.apply if one["kind"] == "Deployment"}
    return {name.removeprefix("chat-"): one["spec"]["template"]["spec"] for name, one in made.items()}


def pod_of(plan: Plan, part: str) -> dict[str, Any]:
    return next(pod for name, pod in pods_of(plan).items() if name.startswith(WORKLOADS[part]))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("asked", POD_PRIVILEGES)
def test_each_is_denied_by_name_unless_it_is_allowed_itself(part, asked):
    spec = PARTS[part](ASKED[asked])
    for allow in (["routes"], [other for other in PRIVILEGES if other != asked]):
        plan = plan_of(spec, *allow)
        assert (plan.apply, plan.delete, plan.scale) == ((), (), ()), "what runs is not touched"
        (valid,) = [one for one in plan.status.conditions if one.type == "Valid"]
        (field,) = ASKED[asked]
        assert (valid.status, valid.reason) == ("False", "InvalidSpec")
        assert f"spec.{part}.pod.{field}: " in valid.message
        assert f"--allow {asked}" in valid.message


@pytest.mark.parametrize("part", PARTS)
def test_allowed_privileges_reach_only_pods_of_their_part(part):
    plain = PARTS[part]({})
    before, after = plan_of(plain, "routes"), plan_of(PARTS[part](EVERYTHING), "routes", *ASKED)
    pod = pod_of(after, part)
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == "admin"
    assert pod["automountServiceAccountToken"] is False
    assert {"name": "host-0", "hostPath": {"path": "/mnt/models", "type": "Directory"}} in pod["volumes"]
    assert {"name": "host-0", "mountPath": "/nvme", "readOnly": True} in container["volumeMounts"]
    security = container["securityContext"]
    assert (security["privileged"], security["runAsUser"], security["readOnlyRootFilesystem"]) == (True, 0, True)
    others = {name: one for name, one in pods_of(after).items() if not name.startswith(WORKLOADS[part])}
    assert others == {name: one for name, one in pods_of(before).items() if name in others}
    for one in after.apply:
        if one["kind"] in ("Deployment", "Service", "NetworkPolicy"):
            kubernetes_validate.validate(one, "1.33", strict=True)


def test_allowed_privileges_reach_all_pods_of_a_group():
    spec = {"engine": {"tensorParallelSize": 2}, "prefill": {"engine": {"nodes": 2}, "pod": EVERYTHING}}
    assert plan_of(spec).apply == ()
    (group,) = [one for one in plan_of(spec, *ASKED).apply if one["kind"] == "LeaderWorkerSet"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][name]["spec"]
        (container,) = pod["containers"]
        assert pod["serviceAccountName"] == "admin"
        assert {"name": "host-0", "hostPath": {"path": "/mnt/models", "type": "Directory"}} in pod["volumes"]
        assert container["securityContext"]["privileged"] is True


def host_path_problem(spec: dict[str, Any]) -> str:
    """What the status says; then nothing is applied."""
    plan = plan_of(spec, "host-paths", "routes")
    (valid,) = [one for one in plan.status.conditions if one.type == "Valid"]
    assert (plan.apply == ()) == (valid.status == "False")
    return valid.message


def mounted(*paths: str) -> dict[str, Any]:
    return {"hostPaths": [{"path": f"/mnt/{number}", "mountPath": path} for number, path in enumerate(paths)]}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (
            {"hostPaths": [{"path": "/mnt/../etc", "mountPath": "/a"}]},
            "[0].path: '/mnt/../etc' leads out of the folder by '..'",
        ),
        (mounted("/a", "/a/"), "[1].mountPath: '/a/' is another one's already"),
        (mounted("//"), "[0].mountPath: '/' is the root of the container"),
    ],
    ids=["way back", "twice", "root"],
)
def test_impossible_host_paths_are_rejected_by_name(part, pod, said):
    """The API server refused the pods of one part, when others had been made, or one mount covered the other."""
    assert f"spec.{part}.pod.hostPaths{said}" in host_path_problem(PARTS[part](pod))


@pytest.mark.parametrize("part", PARTS)
def test_host_path_at_a_volume_of_any_part_is_rejected(part):
    name, folder = ("data", "/data/") if part == "redis.managed" else ("tmp", "/tmp/")
    ours = (
        f"spec.{part}.pod.hostPaths[1].mountPath: {folder!r} is the operator's (volume {name}); choose another folder"
    )
    assert ours in host_path_problem(PARTS[part](mounted("/a", folder)))


MOUNTS = {
    "/kv": {"engine": {"storage": {"claimName": "kv"}, "hostCache": {"sizeGib": 1}}},
    "/kernels": {
        "kernelCacheClaim": "kernels",
        **{role: {"resources": {"limits": {"nvidia.com/gpu": "1"}}} for role in ("prefill", "decode")},
    },
    "/models": {"model": {"claim": {"claimName": "models"}}},
    "/dev/shm": {},
    "/etc/tandem/curve": {},
}
"""Folders of workers that a spec decides about, with that spec."""


@pytest.mark.parametrize("folder", MOUNTS)
def test_host_path_at_a_folder_of_the_spec_is_rejected(folder):
    """Without the field of the spec that takes it, a folder is free."""

    def refusal(path: str, spec: dict[str, Any]) -> str:
        return host_path_problem({**spec, "decode": {**spec.get("decode", {}), "pod": mounted(path)}})

    spec = MOUNTS[folder]
    assert f"spec.decode.pod.hostPaths[0].mountPath: {folder!r} is the operator's" in refusal(folder, spec)
    read_only = folder in ("/models", "/etc/tandem/curve")
    within = f"{folder}/below' is within {folder!r}, which is read-only"
    assert (within in refusal(f"{folder}/below", spec)) == read_only
    assert refusal("/nvme", spec) == ""
    if spec:
        assert refusal(folder, {}) == ""


def test_host_path_of_followers_is_rejected_once():
    group = {"engine": {"tensorParallelSize": 2}, "prefill": {"engine": {"nodes": 2}, "pod": mounted("/tmp")}}
    assert host_path_problem(group).count("/tmp") == 1


OBJECTS = {
    "spec.gateway.httpRoute": ({"gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}}}, "routes"),
    "spec.gateway.inferencePool": ({"gateway": {"inferencePool": {}}}, "routes"),
    "spec.observability.serviceMonitor": ({"observability": {"serviceMonitor": True}}, "monitors"),
}
"""Objects that the cluster's role `edit` gives no right to."""


@pytest.mark.parametrize("field", OBJECTS)
def test_objects_beyond_an_editors_rights_need_an_allowance(field):
    spec, asked = OBJECTS[field]
    for allow in ([], [other for other in PRIVILEGES if other != asked]):
        plan = plan_of(spec, *allow)
        assert (plan.apply, plan.delete, plan.scale) == ((), (), ())
        (valid,) = [one for one in plan.status.conditions if one.type == "Valid"]
        assert f"{field}: this operator does not allow {asked}" in valid.message
        assert f"--allow {asked}" in valid.message
    assert plan_of(spec, asked).apply != ()


@pytest.mark.parametrize("field", OBJECTS)
def test_api_that_the_cluster_lacks_is_named(field):
    """The object was left out of the plan, and the service was reported Ready without it."""
    spec, _ = OBJECTS[field]
    settings = OperatorSettings(apis=ClusterApis(), allow=frozenset(PRIVILEGES))
    plan = make_plan(service_of(**spec), Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    assert plan.apply == ()
    (valid,) = [one for one in plan.status.conditions if one.type == "Valid"]
    assert (valid.status, valid.reason) == ("False", "InvalidSpec")
    assert f"{field}: needs " in valid.message
    assert "which this cluster does not serve; install it (https://" in valid.message


def test_allowed_privileges_change_no_other_service():
    assert plan_of({}, *PRIVILEGES).apply == plan_of({}).apply
    assert plan_of({"prefill": {"pod": {"privileged": False, "hostPaths": []}}}).apply == plan_of({}).apply


def test_node_local_example_needs_its_documented_privileges():
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    assert plan_of(spec).apply == ()
    plan = plan_of(spec, "host-paths", "privileged", "service-accounts")
    assert any("hostPath" in found for found in violations({"spec": pod_of(plan, "prefill")}))
    assert pod_of(plan, "gateway")["serviceAccountName"] == "models-reader"
    assert violations({"spec": pod_of(plan, "redis.managed")}) == []
