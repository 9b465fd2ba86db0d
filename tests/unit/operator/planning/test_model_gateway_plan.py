"""Which services a ModelGateway serves, under which names, and what its status says of them."""

import base64
import json
from dataclasses import replace

import pytest

from tandem_operator.api.model_gateway import ModelGatewayStatus
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.model_gateway import (
    MAX_FILES_BYTES,
    MAX_MODELS,
    Former,
    Referring,
    SharedModels,
    shared_models,
)
from tandem_operator.planning.observed import DeploymentSeen, GatewaySeen, Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.status import GATEWAY_CANARY
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import KubeCluster, service_of
from tandem_testing.kube_gateways import NOW, behind, gateway_of, plan_of


def served(models: SharedModels) -> dict[str, list[str]]:
    """Names by service, as the gateways get them."""
    entries = json.loads(models.models_file)["models"]
    return {one["cluster"].rpartition(".")[2]: one["served_model_name"] for one in entries}


def reasons(models: SharedModels) -> dict[str, str]:
    return {one.name: one.reason for one in models.services}


def after(models: SharedModels) -> Former:
    """What the next reconcile finds."""
    return Former.of(models.models_file, models.files)


def test_entry_has_what_its_service_sets_for_its_model():
    service = behind(
        servedModelName="llama",
        aliases=["gpt"],
        slo={"ttftSeconds": 1.5, "percentile": 0.9, "admission": "shed"},
        gateway={"toolCallParser": "hermes", "limits": {"queueTimeoutSeconds": 5}, "parseSpecialTokens": False},
        redis={
            "external": {
                "url": "rediss://redis.example:6380",
                "password": {"name": "r", "key": "p"},
                "caSecret": {"name": "ca", "key": "ca.pem"},
            }
        },
    )
    models = shared_models(gateway_of(), [service], Former())
    (entry,) = json.loads(models.models_file)["models"]
    keys = entry.pop("curve_keys")
    assert entry == {
        "model": "/models/mini",
        "served_model_name": ["llama", "gpt"],
        "cluster": "models.chat",
        "redis_url": "rediss://redis.example:6380?ssl_ca_certs=/etc/tandem/fleets/chat.redis-ca",
        "redis_password_file": "/etc/tandem/fleets/chat.redis-password",
        "tool_call_parser": "hermes",
        "parse_special_tokens": False,
        "queue_timeout": 5.0,
        "slo_ttft_ms": 1500.0,
        "slo_percentile": 0.9,
        "slo_admission": "shed",
    }
    assert {f"/etc/tandem/fleets/{name}" for name in models.files} == {
        keys,
        entry["redis_password_file"],
        "/etc/tandem/fleets/chat.redis-ca",
    }
    assert models.redis_ports == (6380,)


def test_entry_names_the_password_of_its_sentinels():
    external = {
        "url": "redis+sentinel://sentinel.example:26379/main",
        "sentinelUser": "watch",
        "sentinelPassword": {"name": "s", "key": "p"},
    }
    models = shared_models(gateway_of(), [behind(redis={"external": external})], Former())
    (entry,) = json.loads(models.models_file)["models"]
    file = "/etc/tandem/fleets/chat.redis-sentinel"
    assert entry["redis_url"] == (
        f"redis+sentinel://sentinel.example:26379/main?sentinel_username=watch&sentinel_password_file={file}"
    )
    assert file.rpartition("/")[2] in models.files


def test_other_keys_are_another_entry():
    first, second = (shared_models(gateway_of(), [behind(keys=keys)], Former()) for keys in (b"{}", b"[]"))
    assert first.models_file != second.models_file
    assert first.files.keys() != second.files.keys()


def test_older_service_keeps_a_model_name_that_a_younger_one_wants():
    old, young = behind("b", created="2026-01-01"), behind("a", created="2026-01-02", aliases=["b"])
    models = shared_models(gateway_of(), [young, old], Former())
    assert (served(models), reasons(models)) == ({"b": ["b"]}, {"a": "NameTaken", "b": ""})
    # Age does not matter between one that has a name and one that takes it later.
    models = shared_models(gateway_of(), [young], Former())
    models = shared_models(gateway_of(), [young, old], after(models))
    assert (served(models), reasons(models)) == ({"a": ["a", "b"]}, {"a": "", "b": "NameTaken"})
    models = shared_models(gateway_of(), [behind("a"), old], after(models))
    assert served(models) == {"a": ["a"], "b": ["b"]}


def test_service_with_a_taken_alias_keeps_its_former_names():
    before = shared_models(gateway_of(), [behind("a", created="1"), behind("b", created="2")], Former())
    models = shared_models(
        gateway_of(), [behind("a", created="1", aliases=["b"]), behind("b", created="2")], after(before)
    )
    assert served(models) == {"a": ["a"], "b": ["b"]}
    assert [(one.name, one.served, one.reason, one.models) for one in models.services] == [
        ("a", True, "NameTaken", ["a"]),
        ("b", True, "", ["b"]),
    ]
    assert models.files == before.files


@pytest.mark.parametrize("entry", [{"cluster": "models.chat"}, {"cluster": "models.chat", "served_model_name": []}, 1])
def test_entry_edited_by_hand_is_written_again(entry):
    former = Former.of(json.dumps({"models": [entry]}), {})
    assert served(shared_models(gateway_of(), [behind("chat", reason="InvalidSpec")], former)) == {}
    assert served(shared_models(gateway_of(), [behind("chat")], former)) == {"chat": ["chat"]}


def test_large_authorities_of_one_service_keep_no_other_out():
    external = {"url": "rediss://r.example", "caSecret": {"name": "ca", "key": "c"}}
    large = behind("a", redis={"external": external})
    content = {"a.redis-ca": base64.b64encode(bytes(MAX_FILES_BYTES)).decode()}
    large = replace(large, contents={**large.contents, **content})
    models = shared_models(gateway_of(), [large, behind("b")], Former())
    assert (served(models), reasons(models)) == ({"b": ["b"]}, {"a": "FilesTooLarge", "b": ""})


def test_names_can_be_exchanged_at_once():
    before = shared_models(gateway_of(), [behind("a"), behind("b")], Former())
    swapped = [behind("a", servedModelName="b"), behind("b", servedModelName="a")]
    models = shared_models(gateway_of(), swapped, after(before))
    assert served(models) == {"a": ["b"], "b": ["a"]}


def test_service_with_an_invalid_spec_is_served_as_before():
    before = shared_models(gateway_of(), [behind("a")], Former())
    broken = behind("a", servedModelName="new", reason="InvalidSpec")
    unreadable = Referring(name="a", created=NOW, service=None, reason="InvalidSpec", message="no")
    for one in (broken, unreadable):
        models = shared_models(gateway_of(), [one, behind("c", servedModelName="a")], after(before))
        assert served(models) == {"a": ["a"]}
        assert models.files == before.files
        assert reasons(models) == {"a": "InvalidSpec", "c": "NameTaken"}
    assert served(shared_models(gateway_of(), [broken], Former())) == {}


def test_service_that_goes_takes_its_files_along():
    before = shared_models(gateway_of(), [behind("a"), behind("b")], Former())
    models = shared_models(gateway_of(), [behind("b")], after(before))
    assert {name.partition(".")[0] for name in models.files} == {"b"}


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ({"claim": {"claimName": "weights", "path": "llama"}}, "/models/weights/llama"),
        ({"claim": {"claimName": "weights"}}, "/models/weights"),
        ({"huggingFace": {"id": "o/n", "cacheClaim": "weights"}}, "/models/weights/o/n/main"),
    ],
)
def test_tokenizers_are_read_from_claims_that_the_gateways_mount(model, folder):
    models = shared_models(gateway_of({"claims": ["weights"]}), [behind(model=model)], Former())
    assert json.loads(models.models_file)["models"][0]["model"] == folder
    elsewhere = shared_models(gateway_of({"claims": ["other"]}), [behind(model=model)], after(models))
    assert json.loads(elsewhere.models_file)["models"][0]["model"] == "fleet"
    forced = [behind(model=model, gateway={"tokenizer": "workers"})]
    models = shared_models(gateway_of({"claims": ["weights"]}), forced, after(models))
    assert json.loads(models.models_file)["models"][0]["model"] == "fleet"


@pytest.mark.parametrize("of_service", [True, False])
def test_required_model_folder_that_is_not_mounted_is_refused(of_service):
    setting = {"tokenizer": "model"}
    one = behind(model={"claim": {"claimName": "weights"}}, **({"gateway": setting} if of_service else {}))
    models = shared_models(gateway_of({"claims": ["other"], **({} if of_service else setting)}), [one], Former())
    assert (served(models), reasons(models)) == ({}, {"chat": "NoTokenizer"})


def test_models_file_has_no_more_entries_than_gateways_read():
    services = [behind(f"s{number:03}") for number in range(MAX_MODELS + 1)]
    models = shared_models(gateway_of(), services, Former())
    assert len(served(models)) == MAX_MODELS
    assert reasons(models)[f"s{MAX_MODELS:03}"] == "TooManyModels"


def test_pods_of_a_gateway_depend_on_no_service():
    none, several = plan_of(gateway_of()), plan_of(gateway_of(), behind("a"), behind("b"))
    template = {one["kind"]: one for one in none.apply}["Deployment"]
    assert template == {one["kind"]: one for one in several.apply}["Deployment"]
    changed = {one["kind"] for one in several.apply if one not in none.apply}
    assert changed == {"ConfigMap", "Secret"}


def test_status_counts_services_and_shows_what_is_wrong():
    deployment = DeploymentSeen(name="front-gateway", replicas=2, ready=1, pods=2)
    observed = Observed(now=NOW, deployments=(deployment,))
    services = (behind("a"), behind("b", servedModelName="a"))
    status = plan_of(gateway_of({"replicas": 2}), *services, observed=observed).status
    assert (status.ready, status.served, status.refused) == ("1/2", 1, 1)
    assert status.endpoint == "http://front-gateway.models.svc"
    conditions = {one.type: (one.status, one.reason) for one in status.conditions}
    assert conditions["Ready"] == ("True", "GatewaysReady")
    assert conditions["ServicesServed"] == ("False", "NameTaken")
    assert status.error.startswith("NameTaken: ModelService 'b': 'a' is a name of ModelService 'a'")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"inferencePool": {}}, "spec.inferencePool: an endpoint picker selects workers of one model"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}]}}, "spec.httpRoute: this operator does not allow routes"),
        ({"args": ["--host=1"]}, "spec.args[0]: the operator sets --host itself"),
        ({"args": ["--session-ttl=1"]}, "set spec.engine.sessions.ttlSeconds of the ModelServices"),
        ({"args": ["--console"]}, "set spec.console"),
        ({"args": ["--processes=2"]}, "set spec.processes"),
        (
            {"processes": 4, "resources": {"limits": {"cpu": "2500m"}}},
            "spec.processes: 4 processes use 4 CPUs, and spec.resources.limits[cpu] is 2500m; raise the limit to 4",
        ),
        (
            {"processes": 3, "resources": {"limits": {"memory": "512Mi"}}},
            "spec.processes: 3 processes need 256Mi of memory each, and spec.resources.limits[memory] is 512Mi; raise "
            "the limit to 768Mi, or lower processes",
        ),
        ({"pod": {"patch": {"spec": {"hostNetwork": True}}}}, "spec.pod.patch"),
    ],
)
def test_model_gateway_settings_not_allowed_are_named(spec, sentence):
    settings = OperatorSettings(apis=ClusterApis(inference_pools=True), allow=frozenset())
    if "inferencePool" in spec:
        settings = OperatorSettings(apis=ClusterApis(inference_pools=True), allow=frozenset({"routes"}))
    plan = plan_of(gateway_of(spec), before=ModelGatewayStatus(), settings=settings)
    assert plan.apply == ()
    valid = next(one for one in plan.status.conditions if one.type == "Valid")
    assert valid.status == "False"
    assert sentence in valid.message
    assert "spec.gateway" not in valid.message


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"gateway": {"replicas": 2}}, "spec.gateway.replicas: "),
        ({"gateway": {"processes": 2}}, "spec.gateway.processes: "),
        ({"gateway": {"authSecret": "s"}}, "spec.gateway.authSecret: "),
        ({"gateway": {"limits": {"maxBodyMemoryMib": 1}}}, "spec.gateway.limits.maxBodyMemoryMib: "),
        ({"gateway": {"args": ["--explain-candidates=1"]}}, "spec.gateway.args: "),
        ({"security": {"clientNamespaces": {"a": "b"}}}, "spec.security.clientNamespaces: "),
        ({"model": {"image": {"reference": "r"}}, "gateway": {"tokenizer": "model"}}, "spec.gateway.tokenizer: "),
        ({"model": {"huggingFace": {"id": "o/n"}}, "gateway": {"tokenizer": "model"}}, "spec.gateway.tokenizer: "),
    ],
)
def test_service_with_gateway_ref_has_no_gateway_fields(spec, field):
    (problem,) = problems_of(behind(**spec).service, ClusterApis())
    assert problem.startswith(field)


def test_service_without_gateway_ref_may_have_them():
    assert problems_of(service_of(gateway={"replicas": 2, "strictFields": True}), ClusterApis()) == []


@pytest.mark.parametrize(
    ("gateway", "expected"),
    [
        (None, ("False", "GatewayMissing")),
        (GatewaySeen(reason="NameTaken", message="it is"), ("False", "NameTaken")),
        (GatewaySeen(), ("False", "Starting")),
        (
            GatewaySeen(deployment=DeploymentSeen(name="front-gateway", replicas=1, ready=1), endpoint="http://front"),
            ("False", "CanaryPending"),
        ),
    ],
)
def test_service_reports_what_its_model_gateway_lacks(gateway, expected):
    service = behind().service
    plan = make_plan(service, Observed(now=NOW, gateway=gateway), ModelServiceStatus(), 1, OperatorSettings())
    router = next(one for one in plan.status.conditions if one.type == "RouterReady")
    assert (router.status, router.reason) == expected
    assert plan.status.endpoint == (gateway.endpoint if gateway else "")
    assert "gateway" not in {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in plan.apply}


def moved(gateway: GatewaySeen, *canaries: str) -> set[str]:
    """What is deleted of a service with its own gateways whose spec refers to a ModelGateway now."""
    cluster = KubeCluster()
    cluster.settle(service_of({"model": {"path": "/models/mini"}}))
    known = {name: one for name, one in cluster.canaries.items() if name != GATEWAY_CANARY or name in canaries}
    observed = replace(cluster.observed(), gateway=gateway, canaries=known)
    plan = make_plan(behind().service, observed, cluster.status, 2, OperatorSettings())
    return {f"{ref.kind} {ref.name}" for ref in plan.delete}


def test_own_gateways_stay_until_the_model_gateway_serves():
    ready = GatewaySeen(deployment=DeploymentSeen(name="front-gateway", replicas=1, ready=1))
    assert moved(GatewaySeen(reason="GatewayPending", message="not yet")) == set()
    assert moved(ready) == set()
    gone = {"Deployment chat-gateway", "Service chat-gateway", "NetworkPolicy chat-gateway"}
    assert moved(ready, GATEWAY_CANARY) == gone


def test_network_policies_admit_pods_of_the_model_gateway():
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in make_plan(
            behind().service, Observed(now=NOW, gateway=GatewaySeen()), ModelServiceStatus(), 1, OperatorSettings()
        ).apply
        if one["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == {"chat-worker", "chat-redis"}
    front = {"podSelector": {"matchLabels": {"tandem.dev/gateway": "front"}}}
    for policy in policies.values():
        assert front in policy["ingress"][0]["from"]
    (own,) = [one for one in plan_of(gateway_of()).apply if one["kind"] == "NetworkPolicy"]
    services = {"podSelector": {"matchExpressions": [{"key": "tandem.dev/service", "operator": "Exists"}]}}
    assert services in own["spec"]["egress"][0]["to"]
