"""Defaults that suit a cluster with other tenants: requests, size limits, spread, egress, budgets and time limits.

Every example, and specs that leave out what may be left out, of each kind of container and volume.
"""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.policies import DNS
from tandem_operator.planning.observed import DeploymentSeen, Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import MINIMAL, service_of

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))
HUB = {"huggingFace": {"id": "Qwen/Qwen3-8B"}}
LIMITED = {"resources": {"limits": {"memory": "3Gi"}}}
SPECS: dict[str, dict[str, Any]] = {
    **{path.stem: yaml.safe_load(path.read_text())["spec"] for path in EXAMPLES},
    "downloads": {"model": HUB, "gateway": {"inferencePool": {}}},
    "limits alone": {
        **MINIMAL,
        "prefill": LIMITED,
        "decode": {"resources": {"requests": {"cpu": "3"}}},
        "gateway": {"resources": {}, "inferencePool": {"resources": {}}},
        "redis": {"managed": {"resources": {}}},
    },
    "groups": {**MINIMAL, "engine": {"tensorParallelSize": 2}, "decode": {"engine": {"nodes": 2}}},
}
each_spec = pytest.mark.parametrize("name", SPECS)


def made(spec: dict[str, Any], api: str = "policy/v1", *deployments: DeploymentSeen) -> list[Manifest]:
    apis = ClusterApis(
        pod_disruption_budget=api, http_routes=True, inference_pools=True, pod_monitors=True, leader_worker_sets=True
    )
    settings = OperatorSettings(apis=apis, allow=frozenset(PRIVILEGES))
    observed = Observed(now="2026-01-01T00:00:00Z", deployments=deployments)
    plan = make_plan(service_of(spec), observed, ModelServiceStatus(), 1, settings)
    assert plan.apply, plan.status.conditions
    return list(plan.apply)


def pods(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    """Specs of pods by component."""
    templates = [one["spec"]["template"] for one in manifests if one["kind"] == "Deployment"]
    for one in manifests:
        if one["kind"] == "LeaderWorkerSet":
            templates += [one["spec"]["leaderWorkerTemplate"][part] for part in ("leaderTemplate", "workerTemplate")]
    labels = "app.kubernetes.io/component"
    return {f"{one['metadata']['labels'][labels]}-{number}": one["spec"] for number, one in enumerate(templates)}


@each_spec
def test_every_container_has_requests_of_cpu_and_memory(name):
    """An init container that downloads had none, so quotas refused its pod."""
    for part, pod in pods(made(SPECS[name])).items():
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            requests = container["resources"]["requests"]
            assert {"cpu", "memory"} <= requests.keys(), (part, container["name"])


def test_limit_without_a_request_is_the_request():
    manifests = made(SPECS["limits alone"])
    workers = [
        one for one in manifests if one["kind"] == "Deployment" and "tandem.dev/role" in one["metadata"]["labels"]
    ]
    found = {
        one["metadata"]["labels"]["tandem.dev/role"]: one["spec"]["template"]["spec"]["containers"][0]["resources"]
        for one in workers
    }
    assert found["prefill"] == {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    assert found["decode"] == {"requests": {"cpu": "3", "memory": "1Gi"}}


def test_download_has_the_resources_of_its_field():
    resources = {"requests": {"cpu": "2", "memory": "3Gi"}, "limits": {"memory": "9Gi"}}
    for spec, expected in (
        ({}, {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}),
        ({"resources": resources}, resources),
    ):
        found = pods(made({"model": {"huggingFace": {**HUB["huggingFace"], **spec}}}))
        downloads = [one["resources"] for pod in found.values() for one in pod.get("initContainers", ())]
        assert downloads == [expected] * 2, "workers, and no gateway"


@each_spec
def test_every_empty_volume_has_a_size_limit(name):
    for part, pod in pods(made(SPECS[name])).items():
        limits = {one["name"]: one["emptyDir"].get("sizeLimit") for one in pod["volumes"] if "emptyDir" in one}
        assert limits, part
        assert all(limits.values()), (part, limits)


def test_size_limits_are_fields():
    pod = {"pod": {"scratchLimit": "5Gi"}}
    spec = {
        "model": {"huggingFace": {**HUB["huggingFace"], "sizeLimit": "20Gi"}},
        "decode": {**pod, "sharedMemory": "3Gi"},
        "prefill": {**pod, "sharedMemory": "3Gi"},
        "gateway": pod,
    }
    for part, found in pods(made(spec)).items():
        limits = {one["name"]: one["emptyDir"]["sizeLimit"] for one in found["volumes"] if "emptyDir" in one}
        if part.startswith("worker"):
            assert limits == {"tmp": "5Gi", "shm": "3Gi", "model": "20Gi", "hf-home": "16Gi"}
        if part.startswith("gateway"):
            assert limits == {"tmp": "5Gi"}
    of_model = {**spec, "gateway": {**pod, "tokenizer": "model"}}
    (found,) = [found for part, found in pods(made(of_model)).items() if part.startswith("gateway")]
    limits = {one["name"]: one["emptyDir"]["sizeLimit"] for one in found["volumes"] if "emptyDir" in one}
    assert limits == {"tmp": "5Gi", "model": "20Gi", "hf-home": "16Gi"}


@pytest.mark.parametrize(
    "model",
    [
        {"claim": {"claimName": "weights", "path": "llama"}},
        {"image": {"reference": "registry/model@sha256:0"}},
        {"huggingFace": {"id": "o/n", "cacheClaim": "cache"}},
        {"huggingFace": {"id": "o/n"}},
    ],
    ids=["claim", "image", "cached", "hub"],
)
def test_gateway_has_no_volume_of_the_model_by_default(model):
    (gateway,) = [found for part, found in pods(made({"model": model})).items() if part.startswith("gateway")]
    container = gateway["containers"][0]
    assert container["args"][:2] == ["--model", "fleet"]
    assert "initContainers" not in gateway
    assert {one["name"] for one in gateway["volumes"]} == {"tmp", "curve", "redis-password"}
    assert {one["mountPath"] for one in container["volumeMounts"]}.isdisjoint({"/models", "/hf"})
    spec = {"model": model, "gateway": {"tokenizer": "model"}}
    (gateway,) = [found for part, found in pods(made(spec)).items() if part.startswith("gateway")]
    assert "model" in {one["name"] for one in gateway["volumes"]}


def test_gateway_reads_a_model_of_its_image_there():
    (gateway,) = [found for part, found in pods(made(MINIMAL)).items() if part.startswith("gateway")]
    assert gateway["containers"][0]["args"][:2] == ["--model", MINIMAL["model"]["path"]]
    (gateway,) = [
        found
        for part, found in pods(made({**MINIMAL, "gateway": {"tokenizer": "workers"}})).items()
        if part.startswith("gateway")
    ]
    assert gateway["containers"][0]["args"][:2] == ["--model", "fleet"]


def test_gateways_and_routers_prefer_other_nodes_and_zones():
    found = pods(made({**MINIMAL, "gateway": {"inferencePool": {}}}))
    for part in ("gateway", "router"):
        (pod,) = [one for name, one in found.items() if name.startswith(part)]
        spread = pod["topologySpreadConstraints"]
        assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        assert {one["whenUnsatisfiable"] for one in spread} == {"ScheduleAnyway"}
        assert {one["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in spread} == {part}
    own = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    found = pods(made({**MINIMAL, "gateway": {"pod": {"topologySpreadConstraints": [own]}}}))
    (pod,) = [one for name, one in found.items() if name.startswith("gateway")]
    assert pod["topologySpreadConstraints"] == [own]


def egress(spec: dict[str, Any]) -> dict[str, list[Any]]:
    """Rules beyond the service's own pods and DNS, by part."""
    own = {"to": [{"podSelector": {"matchLabels": {"tandem.dev/service": "chat"}}}]}
    names = {"ports": [{"protocol": kind, "port": port} for port in DNS for kind in ("UDP", "TCP")]}
    found = {}
    for one in made({**MINIMAL, **spec}):
        if one["kind"] == "NetworkPolicy":
            kubernetes_validate.validate(one, "1.36", strict=True)
            assert one["spec"]["policyTypes"] == ["Ingress", "Egress"]
            rules = one["spec"].get("egress", [])
            assert rules[:2] == ([] if one["metadata"]["name"] == "chat-redis" else [own, names])
            found[one["metadata"]["name"].removeprefix("chat-")] = rules[2:]
    return found


def to_ports(*ports: int) -> dict[str, Any]:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}


def test_pods_reach_what_the_spec_names_and_nothing_else():
    assert egress({}) == {"gateway": [], "worker": [], "redis": []}
    assert egress({"model": HUB})["worker"] == [to_ports(443)]
    outside = {
        "redis": {"external": {"url": "rediss://tandem@redis.example:6380/0"}},
        "observability": {"otlpTracesEndpoint": "http://collector:4318/v1/traces"},
        "security": {"egress": [{"cidr": "10.0.0.0/8", "ports": [3128]}, {"cidr": "192.0.2.1/32"}]},
    }
    rules = [
        to_ports(6380, 4318),
        {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], **to_ports(3128)},
        {"to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]},
    ]
    assert egress(outside) == {"gateway": rules, "worker": rules}
    assert egress({"observability": {"otlpTracesEndpoint": "https://collector"}})["gateway"] == [to_ports(443)]
    assert egress({"redis": {"external": {"url": "redis://redis.example"}}})["gateway"] == [to_ports(6379)]


def budgets(api: str, spec: dict[str, Any], *deployments: DeploymentSeen) -> dict[str, dict[str, Any]]:
    found = made({**MINIMAL, **spec}, api, *deployments)
    return {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "PodDisruptionBudget"}


@pytest.mark.parametrize(("api", "policy"), [("policy/v1", "AlwaysAllow"), ("policy/v1beta1", None)])
def test_pods_that_are_not_ready_may_be_evicted(api, policy):
    found = budgets(api, {"gateway": {"replicas": 2}})
    assert len(found) == 3
    assert {one.get("unhealthyPodEvictionPolicy") for one in found.values()} == {policy}


def workers(revision: str, **fields: Any) -> DeploymentSeen:
    name = f"chat-decode-{revision}"
    return DeploymentSeen(name=name, role="decode", revision=revision, replicas=2, pods=2, **fields)


def test_each_revision_has_a_disruption_budget():
    found = budgets("policy/v1", {}, workers("0old", ready=2))
    assert found["chat-decode-0old"]["selector"]["matchLabels"]["tandem.dev/revision"] == "0old"
    assert len([name for name in found if name.startswith("chat-decode-")]) == 2
    gone = DeploymentSeen(name="chat-decode-0old", role="decode", revision="0old", replicas=0)
    assert "chat-decode-0old" not in budgets("policy/v1", {}, gone)


def test_rollout_leaves_node_drains_their_own_pod():
    """With maxUnavailable and no surge a stuck exchange used the budget up."""
    rollout = {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    for exchanging, most in ((True, 2), (False, 1)):
        found = budgets("policy/v1", rollout, workers("0old", exchanging=exchanging))
        assert found["chat-decode-0old"]["maxUnavailable"] == most


def test_group_of_an_old_revision_keeps_its_followers_budget():
    group = workers("0old", api_version="leaderworkerset.x-k8s.io/v1", kind="LeaderWorkerSet")
    assert "chat-decode-0old-followers" in budgets("policy/v1", {}, group)


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [
        ({}, {"request": "0s", "backendRequest": "0s"}),
        ({"request": "1h"}, {"request": "1h", "backendRequest": "0s"}),
        ({"request": "1h", "backendRequest": "90s"}, {"request": "1h", "backendRequest": "90s"}),
    ],
)
def test_route_has_no_time_limits_unless_they_are_set(timeouts, expected):
    """Gateways end a request after a time of their own, in the middle of a stream."""
    route = {"parentRefs": [{"name": "public"}], "timeouts": timeouts}
    (found,) = [one for one in made({**MINIMAL, "gateway": {"httpRoute": route}}) if one["kind"] == "HTTPRoute"]
    assert [rule["timeouts"] for rule in found["spec"]["rules"]] == [expected]
