"""Images and manifests without an operator: what the planner writes is applied once, by hand.

The tests build on each other, in their order: apply, ask, scale by hand under load, evict every pod under load.
"""

import base64
import json

import openai
import pytest
import zmq

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.naming import (
    ROLE_LABEL,
    SERVICE_LABEL,
    curve_secret_name,
    deployment_name,
    gateway_name,
    redis_secret_name,
)
from tandem_operator.builders.redis import PASSWORD_KEY
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import CURVE_KEY
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.control_plane import ControlPlane, Manifest
from tandem_testing.e2e.diary import Diary, of_load
from tandem_testing.e2e.load import Load, more, requests, warm_up
from tandem_testing.e2e.pods import Pods, curl, restarts
from tandem_testing.e2e.service import IMAGES, NAME, SPEC, service_in

pytestmark = pytest.mark.timeout(900)

CLIENTS = 3
WORKERS = {SERVICE_LABEL: NAME, "app.kubernetes.io/component": "worker"}
PREFILL, DECODE = {**WORKERS, ROLE_LABEL: "prefill"}, {**WORKERS, ROLE_LABEL: "decode"}
GATEWAYS = {SERVICE_LABEL: NAME, "app.kubernetes.io/component": "gateway"}


@pytest.fixture(scope="module")
def service(namespace: str) -> Served:
    return service_in(namespace, SPEC)


@pytest.fixture(scope="module")
def pods(control_plane: ControlPlane, namespace: str) -> Pods:
    return Pods(cluster=control_plane, namespace=namespace)


@pytest.fixture(scope="module")
def url(control_plane: ControlPlane, service: Served, pods: Pods, diary: Diary) -> str:
    """Of the service, once all its pods are ready."""
    with diary.step("by hand: manifests applied → every pod Ready"):
        for manifest in [*secrets(service), *manifests(control_plane, service)]:
            answer = control_plane.apply(manifest)
            assert answer.status_code < 300, answer.text
        pods.wait_ready(WORKERS, 2)
        pods.wait_ready(GATEWAYS, 2)
    return pods.service_url(gateway_name(NAME))


def secrets(service: Served) -> list[Manifest]:
    public, secret = zmq.curve_keypair()
    keys = json.dumps({"public": public.decode(), "secret": secret.decode()}).encode()
    contents = {curve_secret_name(NAME): {CURVE_KEY: keys}, redis_secret_name(NAME): {PASSWORD_KEY: b"e2e"}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": service.namespace},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        for name, data in contents.items()
    ]


def manifests(cluster: ControlPlane, service: Served) -> list[Manifest]:
    budgets = "policy/v1" if cluster.serves("policy/v1") else "policy/v1beta1"
    settings = OperatorSettings(**IMAGES, apis=ClusterApis(pod_disruption_budget=budgets))
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    # No controller acts on a pool here.
    return [one for one in plan.apply if one["kind"] != "WorkerPool"]


@pytest.fixture(scope="module")
def references(url: str, diary: Diary) -> dict:
    with diary.step("by hand: first answers"):
        return warm_up(url, NAME, requests())


def test_curl_gets_an_answer_through_the_service(url: str):
    body = json.dumps({"model": NAME, "prompt": "The fox", "max_tokens": 8, "temperature": 0})
    status, answer = curl(f"{url}/v1/completions", body)
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] == 8


def test_openai_client_streams_a_chat(url: str):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    stream = client.chat.completions.create(model=NAME, messages=messages, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices).strip()


def test_decode_workers_are_added_and_removed_under_load(
    pods: Pods, service: Served, url: str, references: dict, diary: Diary
):
    name = deployment_name(NAME, "decode", revision_of(service))
    with diary.step("by hand: decode 1 → 3 → 1 under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            pods.scale(name, 3)
            pods.wait_ready(DECODE, 3)
            more(load, 20)
            pods.scale(name, 1)
            pods.wait_ready(DECODE, 1)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    assert load.summary().failed == 0, load.summary().errors
    assert load.summary().mismatched == 0


def test_kv_went_from_pod_to_pod(pods: Pods, references: dict, diary: Diary):
    """Prompts are computed by the prefill worker, and their pages arrive whole at another pod."""
    with diary.step("KV moved between pods") as entry:
        entry.update(pods.handovers(PREFILL))
    assert entry["handovers"] > 0
    assert entry["failed"] == 0


def test_every_pod_is_evicted_under_load(pods: Pods, url: str, references: dict, diary: Diary):
    """As a drained node does it: within the disruption budgets, one after the other, with a successor for each."""
    with diary.step("by hand: every worker and gateway evicted under load") as entry:
        with Load(url, NAME, references, clients=CLIENTS) as load:
            for selector, count in ((WORKERS, 2), (GATEWAYS, 2)):
                pods.replace_each(selector, count)
            more(load, 10)
        entry["load"] = of_load(load.summary())
    assert load.summary().failed == 0, load.summary().errors
    assert load.summary().mismatched == 0


def test_no_container_of_the_manifests_restarted(pods: Pods):
    assert {one["metadata"]["name"]: restarts(one) for one in pods.named({}) if restarts(one)} == {}
