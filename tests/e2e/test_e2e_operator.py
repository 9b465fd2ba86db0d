"""A ModelService from its first `apply` to its deletion, by our operator, with clients asking all the while.

The tests build on each other, in their order.
"""

import base64
import io
import json
import time

import httpx
import openai
import pytest

from tandem_operator.builders.naming import ROLE_LABEL, SERVICE_LABEL, curve_secret_name, gateway_name
from tandem_operator.builders.worker import CURVE_KEY, HEALTH_PORT
from tandem_operator.telemetry.worker_control import order_token
from tandem_services.cli.k8s import command
from tandem_testing.control_plane import ControlPlane
from tandem_testing.e2e.diary import Diary, of_load
from tandem_testing.e2e.load import Load, more, requests, warm_up
from tandem_testing.e2e.operator import NAMESPACE as OPERATORS_NAMESPACE
from tandem_testing.e2e.operator import Resource, install
from tandem_testing.e2e.pods import Pods, curl, restarts
from tandem_testing.e2e.service import NAME, SPEC
from tandem_testing.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

CLIENTS = 3
WORKERS = {SERVICE_LABEL: NAME, "app.kubernetes.io/component": "worker"}
PREFILL, DECODE = {**WORKERS, ROLE_LABEL: "prefill"}, {**WORKERS, ROLE_LABEL: "decode"}
GATEWAYS = {SERVICE_LABEL: NAME, "app.kubernetes.io/component": "gateway"}
REDIS = {SERVICE_LABEL: NAME, "app.kubernetes.io/component": "redis"}
UNSCHEDULED_S = 20.0
"""Longer than a request waits for a worker of which nothing is known."""
READY_S = 60.0
"""Apply → Ready, once images are there (issue: speed)."""
ROLLED = {**SPEC, "engine": {**SPEC["engine"], "pageSize": 64}}
SCALED = {
    **SPEC,
    "decode": {
        **SPEC["decode"],
        "scaling": {"minReplicas": 1, "maxReplicas": 3, "targetQueueSeconds": 0.2},
        "engine": {"maxRunningRequests": 8},
    },
    "prefill": {**SPEC["prefill"], "scaling": {"minReplicas": 1, "maxReplicas": 1}},
    "autoscaling": {
        "mode": "internal",
        "flipRoles": False,
        "periodSeconds": 5,
        "scaleDownWindowSeconds": 30,
        "cooldownSeconds": 5,
    },
}


@pytest.fixture(scope="module")
def pods(control_plane: ControlPlane, namespace: str) -> Pods:
    return Pods(cluster=control_plane, namespace=namespace)


@pytest.fixture(scope="module")
def resource(control_plane: ControlPlane, namespace: str, diary: Diary) -> Resource:
    """Ready for the first time."""
    with diary.step("operator installed → Ready"):
        install(control_plane)
    resource = Resource(cluster=control_plane, namespace=namespace, name=NAME)
    with diary.step("ModelService applied → Ready"):
        resource.apply(SPEC)
        resource.wait_ready()
    return resource


@pytest.fixture(scope="module")
def url(resource: Resource, pods: Pods) -> str:
    return pods.service_url(gateway_name(NAME))


@pytest.fixture(scope="module")
def references(url: str) -> dict:
    return warm_up(url, NAME, requests())


def check(load: Load) -> None:
    """No client lost anything."""
    summary = load.summary()
    assert summary.failed == 0, summary.errors
    assert summary.mismatched == 0
    assert summary.checked == summary.requests > 0


def test_operator_is_ready_within_a_minute(resource: Resource, diary: Diary):
    entry = next(one for one in diary.entries if one["step"] == "ModelService applied → Ready")
    assert entry["seconds"] <= READY_S


def test_curl_gets_an_answer_through_the_service(resource: Resource, url: str):
    assert resource.read()["status"]["endpoint"] == f"http://{gateway_name(NAME)}.{resource.namespace}.svc"
    status, answer = curl(f"{url}/v1/completions", json.dumps({"model": NAME, "prompt": "The fox", "max_tokens": 8}))
    assert status == 200, answer


def test_openai_client_streams_a_chat(url: str):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    stream = client.chat.completions.create(model=NAME, messages=messages, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices).strip()


def test_decode_is_scaled_by_order(resource: Resource, url: str, references: dict, diary: Diary):
    with diary.step("decode 1 → 3 → 1 by order, under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            for replicas in (3, 1):
                resource.apply({**SPEC, "decode": {**SPEC["decode"], "replicas": replicas}})
                resource.wait_for_workers(DECODE, replicas)
                more(load, 10)
        entry["load"] = of_load(load.summary())
    check(load)


def test_kv_went_from_pod_to_pod(pods: Pods, references: dict, diary: Diary):
    """Prompts are computed by the prefill worker, and their pages arrive whole at another pod."""
    with diary.step("KV moved between pods") as entry:
        entry.update(pods.handovers(PREFILL))
    assert entry["handovers"] > 0
    assert entry["failed"] == 0


def test_kubectl_tandem_shows_and_queries_running_pods(resource: Resource, pods: Pods, url: str, capsys, monkeypatch):
    """Through port-forwards of the real kubelet: what the pods know of roles, queues and one request, and a chat."""
    about = ("--kubeconfig", str(resource.cluster.kubeconfig), "-n", resource.namespace)

    def plugin(*words: str) -> str:
        status = command.main([*words, *about])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    prefill, decode = pods.ready(PREFILL), pods.ready(DECODE)
    roles = plugin("roles", NAME)
    assert all(name in roles for name in (*prefill, *decode))
    assert all(name in plugin("queue", NAME) for name in (*prefill, *decode, *pods.ready(GATEWAYS)))
    body = {"model": NAME, "prompt": "The fox and the crow " * 20, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    assert decode[0] in plugin("explain", answer["id"])
    assert f"{prefill[0]} serves as prefill" in plugin("flip", prefill[0], "prefill")
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me of a fox.\n"))
    assert plugin("chat", NAME, "--max-tokens", "8").strip()
    assert "Ready" in plugin("status", NAME)


def test_worker_changes_its_role(resource: Resource, pods: Pods, url: str, references: dict, diary: Diary):
    """Prefill to decode and back, by the order that the operator gives."""
    secret = pods.cluster.get(f"{pods.core}/secrets/{curve_secret_name(NAME)}")["data"][CURVE_KEY]
    token = {"Authorization": f"Bearer {order_token(base64.b64decode(secret))}"}
    resource.apply({**SPEC, "prefill": {**SPEC["prefill"], "replicas": 2}})
    resource.wait_for_workers(PREFILL, 2)
    (worker, *_) = pods.named(PREFILL)
    address = f"http://{worker['status']['podIP']}:{HEALTH_PORT}"
    with diary.step("a worker flipped to decode and back, under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            for role in ("decode", "prefill"):
                answer = httpx.post(f"{address}/role", json={"role": role}, headers=token, timeout=60.0)
                assert answer.status_code == 200, answer.text
                more(load, 20)
        entry["load"] = of_load(load.summary())
    check(load)
    resource.apply(SPEC)
    resource.wait_for_workers(PREFILL, 1)


@pytest.mark.parametrize("spec", [ROLLED, SPEC], ids=["forward", "back"])
def test_revision_is_rolled_out(
    spec: dict, resource: Resource, pods: Pods, url: str, references: dict, diary: Diary, request: pytest.FixtureRequest
):
    """Another page size: KV of the two revisions does not fit each other, so pairs change and never mix."""
    before = resource.read()["status"]["revision"]
    with diary.step(f"revision rolled {request.node.callspec.id} under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            resource.apply(spec)
            status = resource.wait_ready(480.0)
            wait_for(lambda: not pods.named({**WORKERS, "tandem.dev/revision": before}), 240.0, resource.explain)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    check(load)
    assert status["revision"] != before
    assert before in status["history"]


def test_every_pod_is_evicted(resource: Resource, pods: Pods, url: str, references: dict, diary: Diary):
    """As a drained node does it: within the disruption budgets, one after the other, with a successor for each."""
    with diary.step("every worker and gateway evicted under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            for selector, count in ((WORKERS, 2), (GATEWAYS, 2)):
                pods.replace_each(selector, count)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    check(load)


def test_successor_without_a_node_is_waited_for(
    resource: Resource, pods: Pods, url: str, references: dict, diary: Diary
):
    """It reports nothing, like one that pulls its image: the gateways know that something replaces lost workers."""
    (name,) = pods.ready(DECODE)
    with diary.step(f"the decode worker evicted, its successor without a node for {UNSCHEDULED_S:.0f} s") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            with pods.cordoned():
                pods.evict(name)
                pods.wait_gone(name)
                answered = load.answered
                time.sleep(UNSCHEDULED_S)
                assert load.under_way == CLIENTS
                assert load.answered <= answered + CLIENTS
            resource.wait_for_workers(DECODE, 1)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    check(load)


def test_redis_is_evicted(resource: Resource, pods: Pods, url: str, references: dict, diary: Diary):
    """A drained node takes it, too. Its successor is empty, and all workers report again."""
    with diary.step("Redis evicted under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            (name,) = pods.ready(REDIS)
            pods.evict(name)
            pods.wait_gone(name)
            pods.wait_ready(REDIS, 1)
            more(load, 30)
        entry["load"] = of_load(load.summary())
    check(load)


def test_everything_is_restarted_in_turn(
    resource: Resource, pods: Pods, url: str, references: dict, diary: Diary
):  # [rolling-loses-nothing]
    """By `kubectl rollout restart`: workers of both roles, gateways, Redis, and the operator that looks after them."""
    kubectl, namespace = resource.cluster.kubectl, resource.namespace
    names = [("-n", namespace, one) for one in kubectl("-n", namespace, "get", "deployments", "-o", "name").split()]
    names.append(("-n", OPERATORS_NAMESPACE, "deployment/tandem-operator"))
    with diary.step("everything restarted in turn, under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            for *where, name in names:
                kubectl(*where, "rollout", "restart", name)
                kubectl(*where, "rollout", "status", name, "--timeout=240s")
                more(load, 5)
            resource.wait_ready()
        entry["load"] = of_load(load.summary())
    check(load)
    pods.wait_ready(WORKERS, 2)


def test_decode_is_scaled_by_its_load(resource: Resource, pods: Pods, url: str, references: dict, diary: Diary):
    with diary.step("decode 1 → 3 → 1 by load") as entry:
        resource.apply(SCALED)
        resource.wait_ready()
        # Three times as many clients as a worker has places.
        with Load(url, NAME, references, clients=24) as load:
            pods.wait_ready(DECODE, 3, 300.0)
        pods.wait_ready(DECODE, 1, 300.0)
        entry["load"] = of_load(load.summary())
    check(load)
    decisions = resource.read()["status"]["decisions"]
    assert any(one["action"] == "scale" for one in decisions), decisions


def test_no_container_of_the_operator_restarted(pods: Pods):
    assert {one["metadata"]["name"]: restarts(one) for one in pods.named({}) if restarts(one)} == {}


def delete(resource: Resource, policy: str) -> None:
    body = {"propagationPolicy": policy}
    resource.cluster.api.request("DELETE", resource.path, json=body).raise_for_status()


def wait_nothing_left(pods: Pods) -> None:
    """Of a deleted service."""
    for path in (
        f"{pods.core}/pods",
        f"{pods.core}/services",
        f"/apis/apps/v1/namespaces/{pods.namespace}/deployments",
        f"/apis/tandem.dev/v1beta1/namespaces/{pods.namespace}/workerpools",
        f"/apis/tandem.dev/v1beta1/namespaces/{pods.namespace}/modelservices",
    ):
        wait_for(lambda path=path: not pods.cluster.get(path)["items"], 180.0, lambda path=path: path)
    # Garbage collection takes Secrets after the pools that own them.
    secret = f"{pods.core}/secrets/{curve_secret_name(NAME)}"
    wait_for(lambda: pods.cluster.api.get(secret).status_code == 404, 60.0, lambda: secret)


@pytest.mark.parametrize("policy", ["Foreground", "Background"])
def test_deleted_service_finishes_its_requests(
    policy: str, resource: Resource, pods: Pods, references: dict, diary: Diary
):
    """Also where the garbage collector deletes workers and Redis together with the gateways (Foreground)."""
    resource.apply(SPEC)
    resource.wait_ready()
    url = pods.service_url(gateway_name(NAME))
    with diary.step(f"ModelService deleted under load ({policy}) → nothing left") as entry:
        # More than one step of a worker takes: some have to wait for a step, and some are between two workers.
        with Load(url, NAME, references, clients=12) as load:
            more(load, 12)
            wait_for(lambda: load.under_way == 12, 60.0, lambda: f"{load.under_way} under way")
            load.stop()
            delete(resource, policy)
            entry["under way"] = load.under_way
        entry["load"] = of_load(load.summary())
        wait_nothing_left(pods)
    check(load)
    assert entry["under way"] > 0
