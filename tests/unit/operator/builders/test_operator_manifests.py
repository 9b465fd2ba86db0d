"""Manifests: within the Pod Security Standard "restricted", read by our commands."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tandem_operator.api.engine import Engine
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.worker_pool import WorkerPool
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.engine_flags import ENGINE_FLAGS
from tandem_operator.builders.gateway import allowed_hosts, gateway_deployment
from tandem_operator.builders.naming import ROLE_LABEL
from tandem_operator.builders.served import may_be_zero
from tandem_operator.builders.worker import worker_deployment
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_services.cli.main import build_parser
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.redis_url import RedisUrl
from tandem_services.common.settings import read_settings
from tandem_services.gateway.config import GatewayConfig
from tandem_services.worker.service import ORDER_TIMEOUT_S, SHUTDOWN_GRACE_S
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_gateways import behind, gateway_of, plan_of
from tandem_testing.pod_security import violations

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.stem != "node-local")
"""But the one whose pods are more than restricted (`test_privileges`)."""


def manifests(path: Path) -> list[Manifest]:
    example = yaml.safe_load(path.read_text())
    service = service_of(example["spec"], name=example["metadata"]["name"])
    apis = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True, leader_worker_sets=True)
    settings = OperatorSettings(apis=apis, allow=frozenset({"routes", "monitors"}))
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    return [*plan.apply, *([] if service.has_gateways else of_its_gateway(settings))]


def of_its_gateway(settings: OperatorSettings) -> list[Manifest]:
    """Of the ModelGateway of the examples, with such a service and one on its claim."""
    example = yaml.safe_load((ROOT / "examples/gateway/model-gateway.yaml").read_text())
    gateway = gateway_of(example["spec"], name=example["metadata"]["name"])
    claimed = behind("search", model={"claim": {"claimName": "models", "path": "search"}})
    return list(plan_of(gateway, behind(), claimed, settings=settings).apply)


def templates(path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for one in manifests(path):
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Deployment":
            found.append((name, spec["template"]))
        elif one["kind"] == "LeaderWorkerSet":
            pair = spec["leaderWorkerTemplate"]
            found += [(name, pair["leaderTemplate"]), (f"{name}/follower", pair["workerTemplate"])]
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pool_manifests_match_their_schema(path):
    pools = [one for one in manifests(path) if one["kind"] == "WorkerPool"]
    assert len(pools) == 2
    for pool in pools:
        msgspec.convert({"spec": pool["spec"]}, WorkerPool)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pods_meet_the_restricted_standard(path):
    for name, template in templates(path):
        assert violations(template) == [], name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pods_have_no_rights_and_read_only_root_filesystems(path):
    for name, template in templates(path):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        assert "serviceAccountName" not in pod, name
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_mount_has_its_volume(path):
    for name, template in templates(path):
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in containers(template["spec"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_selectors_find_their_own_pods_alone(path):
    """Of two Deployments none takes the other's pods, and every Service and budget finds some."""
    labels = {name: template["metadata"]["labels"] for name, template in templates(path)}
    for one in manifests(path):
        selector = one.get("spec", {}).get("selector")  # ConfigMaps and Secrets have no spec
        if not isinstance(selector, dict):
            continue
        wanted = selector.get("matchLabels", selector)
        found = [name for name, own in labels.items() if wanted.items() <= own.items()]
        if one["kind"] == "Deployment":
            assert found == [one["metadata"]["name"]]
        else:
            assert found, one["metadata"]["name"]


def test_services_with_similar_names_share_no_object_or_pod():
    """No service can claim an object of another one, though it has a name of its own objects [owner-only]."""
    spec = yaml.safe_load((ROOT / "examples/full.yaml").read_text())["spec"] | {"redis": {"managed": {}}}
    apis = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True)
    made: dict[str, list[Manifest]] = {}
    for name in ("chat", "chat-decode", "chat-gateway", "chat-prefill", "chat-redis", "chat-router", "chat-worker"):
        service = service_of(spec, name=name)
        seen = Observed(now="2026-01-01T00:00:00Z")
        settings = OperatorSettings(apis=apis, allow=frozenset({"routes", "monitors"}))
        made[name] = list(make_plan(service, seen, ModelServiceStatus(), 1, settings).apply)
    refs = [(one["kind"], one["metadata"]["name"]) for objects in made.values() for one in objects]
    assert len(refs) == len(set(refs)) > len(made)
    for name, objects in made.items():
        pods = [one["spec"]["template"]["metadata"]["labels"] for one in objects if one["kind"] == "Deployment"]
        assert pods
        for other, theirs in made.items():
            for one in theirs:
                selector = one["spec"].get("selector", one["spec"].get("podSelector"))
                if other != name and isinstance(selector, dict):
                    wanted = selector.get("matchLabels", selector)
                    assert not any(wanted.items() <= labels.items() for labels in pods), one["metadata"]["name"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_our_commands_understand_their_arguments(path):
    seen = set()
    for _, template in templates(path):
        for container in template["spec"]["containers"]:
            if container.get("command", [""])[0] == "tandem":
                words = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in container["args"]]
                build_parser().parse_args([*container["command"][1:], *words])
                seen.add(container["name"])
    assert seen == {"worker", "gateway"} | ({"router"} if path.stem == "full" else set())


@pytest.mark.parametrize("canaries", [True, False])
def test_workers_start_on_standby_with_their_revision(canaries):
    service = service_of()
    plan = make_plan(
        service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, OperatorSettings(canaries=canaries)
    )
    deployments = [one for one in plan.apply if ROLE_LABEL in one["metadata"]["labels"] and one["kind"] == "Deployment"]
    assert len(deployments) == 2
    for one in deployments:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        settings = read_settings({each["name"]: each.get("value", "") for each in container["env"]})
        assert settings.warnings == ()
        assert (settings.standby, settings.peer_group) == (canaries, revision_of(service))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_amounts_are_strings_as_server_side_apply_wants_them(path):
    """Numbers, as people write them and as RDMA devices are counted, were refused by the API server."""
    for name, template in templates(path):
        for container in containers(template["spec"]):
            amounts = [one for part in container.get("resources", {}).values() for one in part.values()]
            assert all(isinstance(one, str) for one in amounts), name


def test_every_engine_setting_has_its_flag():
    of_their_own = {"device", "speculation", "host_cache", "storage", "sessions", "lora", "args"}
    assert set(ENGINE_FLAGS) == set(Engine.__struct_fields__) - of_their_own


def test_equal_specs_give_equal_manifests():
    assert manifests(EXAMPLES[0]) == manifests(EXAMPLES[0])


def test_redis_password_is_in_no_manifest_or_command_line():
    deployment = next(
        one for one in manifests(ROOT / "examples/minimal.yaml") if one["metadata"]["name"] == "chat-redis"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "cat /etc/tandem/redis/password" in container["command"][-1]
    assert "--requirepass" not in str(container)


def test_private_redis_ca_is_mounted_and_in_its_address():
    path = ROOT / "examples/full.yaml"
    deployments = [template for name, template in templates(path) if "redis" not in name]
    assert len(deployments) == 4
    for template in deployments:
        container, *_ = template["spec"]["containers"]
        mount = next(one for one in container["volumeMounts"] if one["name"] == "redis-ca")
        url = container["args"][container["args"].index("--redis-url") + 1]
        assert url == (
            "rediss+sentinel://tandem@sentinel-0.example:26380,sentinel-1.example/main/0"
            f"?ssl_ca_certs={mount['mountPath']}/ca.crt"
            "&sentinel_username=reader&sentinel_password_file=/etc/tandem/redis-sentinel/password"
        )
        files = RedisUrl.parse(url).files
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        assert {str(path.parent) for path in files.values()} <= mounts


def flag(args: list[str], name: str) -> float:
    return float(args[args.index(name) + 1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_grace_period_covers_the_whole_end_of_a_process(path):  # [drain-loses-nothing]
    seen = set()
    for _, template in templates(path):
        container, *_ = template["spec"]["containers"]
        grace = template["spec"]["terminationGracePeriodSeconds"]
        args = container.get("args", [])
        if container["name"] == "worker":
            assert grace > stay_of(container) + flag(args, "--drain-timeout") + ORDER_TIMEOUT_S + SHUTDOWN_GRACE_S
        elif container["name"] == "gateway":
            assert grace > flag(args, "--drain-notice") + flag(args, "--drain-timeout")
        seen.add(container["name"])
    assert seen >= {"worker", "gateway"}


def stay_of(container: Manifest) -> float:
    """Seconds between the deletion of a container's pod and its SIGTERM."""
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    return float(seconds)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_workers_deleted_with_gateways_take_what_those_take(path):
    parts = {
        container["name"]: container for _, template in templates(path) for container in template["spec"]["containers"]
    }
    assert stay_of(parts["worker"]) > flag(parts["gateway"]["args"], "--drain-notice")


def test_gateway_holds_requests_where_there_may_be_no_worker():
    def args(name: str) -> list[str]:
        return next(
            container["args"]
            for _, template in templates(ROOT / "examples" / name)
            for container in template["spec"]["containers"]
            if container["name"] == "gateway"
        )

    assert flag(args("autoscaling.yaml"), "--from-zero-timeout") < GatewayConfig(models=()).request_timeout_s
    assert "--from-zero-timeout" not in args("minimal.yaml")


def test_only_a_scaled_service_may_be_at_zero():
    def may(autoscaling: dict[str, Any], least: int) -> bool:
        role = {"scaling": {"minReplicas": least}}
        return may_be_zero(service_of(prefill=role, decode=role, autoscaling=autoscaling).spec)

    assert may({"mode": "internal", "idleSecondsToZero": 60}, 0)
    assert may({"mode": "external"}, 0)
    assert not may({"mode": "internal"}, 0)
    assert not may({"mode": "external"}, 1)
    assert not may({"mode": "none", "idleSecondsToZero": 60}, 0)


def test_compiled_kernels_are_kept_on_the_claim_of_a_service():
    def worker(role: str = "decode", **spec: Any) -> Any:
        service = service_of(**spec, decode={"resources": {"limits": {"nvidia.com/gpu": 1}}})
        return worker_deployment(service, role, "law", 1)["spec"]["template"]["spec"]

    def cache(pod: Any) -> str:
        (found,) = (one["value"] for one in pod["containers"][0]["env"] if one["name"] == "TRITON_CACHE_DIR")
        return found

    pod = worker(kernelCacheClaim="compiled")
    (volume,) = (one for one in pod["volumes"] if one["name"] == "kernels")
    (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "kernels")
    assert volume["persistentVolumeClaim"] == {"claimName": "compiled"}
    assert cache(pod) == f"{mount['mountPath']}/triton-10001"
    other = worker(kernelCacheClaim="compiled", security={"runAsUser": 20002})
    assert cache(other) == f"{mount['mountPath']}/triton-20002", "folders of another user are refused"
    for without in (worker(), worker("prefill", kernelCacheClaim="compiled")):
        assert not any(one["name"] == "kernels" for one in without["volumes"])
        assert cache(without) == "/tmp/triton"


def test_group_is_one_worker_with_pods_numbered_by_controller():
    everything = manifests(ROOT / "examples/multi-node.yaml")
    (group,) = [one for one in everything if one["kind"] == "LeaderWorkerSet"]
    made = {one["metadata"]["name"]: one for one in everything if one["kind"] != "LeaderWorkerSet"}
    assert group["metadata"]["labels"][ROLE_LABEL] == "decode"
    spec, pair = group["spec"], group["spec"]["leaderWorkerTemplate"]
    assert (spec["replicas"], pair["size"], pair["restartPolicy"]) == (1, 2, "RecreateGroupOnPodRestart")
    # With LeaderReady followers would wait for leaders that wait for them.
    assert spec["startupPolicy"] == "LeaderCreated"
    leader, follower = pair["leaderTemplate"], pair["workerTemplate"]
    assert leader["spec"] == follower["spec"]
    words = leader["spec"]["containers"][0]["args"]
    for flag, value in (
        ("--tensor-parallel-size", "16"),
        ("--nnodes", "2"),
        ("--node-rank", "$(LWS_WORKER_INDEX)"),
        ("--dist-init-addr", "$(LWS_LEADER_ADDRESS):5757"),
    ):
        assert words[words.index(flag) + 1] == value
    component = "app.kubernetes.io/component"
    assert (leader["metadata"]["labels"][component], follower["metadata"]["labels"][component]) == (
        "worker",
        "follower",
    )
    # A follower does not count as a worker; it is protected all the same.
    for name in (f"{group['metadata']['name']}-followers", "large-follower"):
        selector = made[name]["spec"].get("podSelector", made[name]["spec"].get("selector"))["matchLabels"]
        assert selector.items() <= follower["metadata"]["labels"].items()
        assert not selector.items() <= leader["metadata"]["labels"].items()


def test_gateways_have_the_flag_for_replaced_workers():
    """By a variable: images of earlier releases refuse unknown flags, and only warn of unknown variables."""
    shared = of_its_gateway(OperatorSettings())
    own = manifests(ROOT / "examples/minimal.yaml")
    deployments = [one for one in (*shared, *own) if one["kind"] == "Deployment"]
    pods = [one["spec"]["template"]["spec"]["containers"][0] for one in deployments]
    pods = [one for one in pods if one["name"] == "gateway"]
    assert len(pods) == 2
    for pod in pods:
        assert {"name": "TANDEM_REPLACED_WORKERS", "value": "1"} in pod["env"]
        assert not any("replaced" in word for word in pod["args"])
    parsed = build_parser().parse_args(["gateway", "--redis-url", "redis://r", "--model", "/m", "--replaced-workers"])
    assert parsed.replaced_workers


def test_gateway_has_the_processes_of_the_spec():
    def words(gateway: dict[str, Any]) -> list[str]:
        pod = gateway_deployment(service_of(gateway=gateway))["spec"]["template"]["spec"]
        return list(pod["containers"][0]["args"])

    given = words({"processes": 4})
    assert build_parser().parse_args(["gateway", *given]).processes == 4
    assert "--processes" not in words({}), "images of earlier releases do not know it"


def test_gateway_has_the_byte_budget_of_the_spec():
    def words(limits: dict[str, int]) -> list[str]:
        service = service_of({"model": {"path": "/m"}, "gateway": {"limits": limits}}, name="llama")
        observed = Observed(now="2026-01-01T00:00:00Z")
        plan = make_plan(service, observed, ModelServiceStatus(), 1, OperatorSettings())
        deployments = {one["metadata"]["name"]: one for one in plan.apply if one["kind"] == "Deployment"}
        (container,) = deployments["llama-gateway"]["spec"]["template"]["spec"]["containers"]
        return list(container["args"])

    assert not {"--max-body-memory", "--max-body-memory-per-client"} & {*words({})}
    given = words({"maxBodyMemoryMib": 512, "maxBodyMemoryPerClientMib": 500})
    parsed = build_parser().parse_args(["gateway", *given])
    assert (parsed.max_body_memory, parsed.max_body_memory_per_client) == (512, 500)


@pytest.mark.parametrize(
    ("gateway", "hosts"),
    [
        ({}, ["llama-gateway.models"]),
        ({"allowedHosts": ["llm.example.com"]}, ["llama-gateway.models", "llm.example.com"]),
        ({"allowedHosts": ["*"]}, ["llama-gateway.models", "*"]),
        ({"allowedHosts": ["a.example"], "authSecret": "keys"}, ["llama-gateway.models", "a.example"]),
        (
            {"httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": ["llm.example.com", "*.corp.example"]}},
            ["llama-gateway.models", "llm.example.com", "*.corp.example"],
        ),
        ({"httpRoute": {"parentRefs": [{"name": "g"}]}}, ["*"]),
        ({"inferencePool": {}}, ["*"]),
        ({"authSecret": "keys"}, ["*"]),
        ({"service": {"type": "LoadBalancer"}}, ["*"]),
    ],
)
def test_gateway_allows_the_host_names_that_clients_use(gateway, hosts):
    service = service_of({"model": {"path": "/m"}, "gateway": gateway}, name="llama")
    words = allowed_hosts(service)
    assert words == [host.replace("models", service.namespace) for host in hosts]
    AllowedHosts.of(words, listening=("::",))
