"""InferencePools: gateways as endpoints, our router as their picker, where the cluster has the interface."""

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of

ROUTE = {"parentRefs": [{"name": "public"}]}
ALL = ClusterApis(http_routes=True, inference_pools=True)


def made(apis: ClusterApis = ALL, model: dict | None = None, **gateway) -> dict[tuple[str, str], dict]:
    source = {} if model is None else {"model": model}
    service = service_of(gateway={"httpRoute": ROUTE, **gateway}, aliases=["gpt"], **source)
    settings = OperatorSettings(apis=apis, allow=frozenset({"routes"}))
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    return {(one["kind"], one["metadata"]["name"]): one for one in plan.apply}


def backend(objects) -> dict:
    (rule,) = objects["HTTPRoute", "chat-gateway"]["spec"]["rules"]
    (one,) = rule["backendRefs"]
    return one


def test_inference_pool_selects_gateways_and_names_its_picker_and_service():
    objects = made(inferencePool={"replicas": 2})
    pool = objects["InferencePool", "chat"]["spec"]
    gateways = objects["Deployment", "chat-gateway"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= gateways["metadata"]["labels"].items()
    (port,) = pool["targetPorts"]
    assert {"name": "http", "containerPort": port["number"], "protocol": "TCP"} in gateways["spec"]["containers"][0][
        "ports"
    ]
    picker = objects["Service", pool["endpointPickerRef"]["name"]]["spec"]
    router = objects["Deployment", "chat-router"]["spec"]
    assert router["replicas"] == 2
    assert picker["selector"].items() <= router["template"]["metadata"]["labels"].items()
    assert picker["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    (container,) = router["template"]["spec"]["containers"]
    headless = objects["Service", "chat-gateways"]["spec"]
    assert headless["clusterIP"] == "None"
    assert container["args"][:4] == [
        "--model",
        "chat,gpt=/models/tandem-mini",
        "--gateway",
        f"chat-gateways.models.svc:{headless['ports'][0]['port']}",
    ]
    assert backend(objects) == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat"}
    assert ("NetworkPolicy", "chat-router") in objects


@pytest.mark.parametrize(("tokenizer", "has_volume"), [("workers", False), ("model", True), (None, False)])
def test_picker_reads_the_tokenizer_as_gateways_do(tokenizer, has_volume):
    source = {"claim": {"claimName": "models", "path": "llama"}}
    objects = made(model=source, inferencePool={}, **({} if tokenizer is None else {"tokenizer": tokenizer}))
    pod = objects["Deployment", "chat-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert ("chat,gpt=fleet" in container["args"]) is not has_volume
    claims = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert bool(claims) is has_volume


def test_route_without_inference_pool_points_to_the_service():
    objects = made()
    assert not {("InferencePool", "chat"), ("Deployment", "chat-router"), ("NetworkPolicy", "chat-router")} & {*objects}
    assert backend(objects) == {"name": "chat-gateway", "port": 80}


def test_gateway_and_router_agree_on_special_tokens():
    plain = "--no-parse-special-tokens"
    for wanted in (True, False):
        objects = made(inferencePool={}, parseSpecialTokens=wanted)
        for name in ("chat-gateway", "chat-router"):
            (container,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
            assert (plain in container["args"]) is not wanted, name


def test_requests_of_a_picker_above_its_limits_are_refused():
    resources = {"requests": {"memory": "1Gi"}, "limits": {"memory": "512Mi"}}
    service = service_of(gateway={"inferencePool": {"resources": resources}})
    found = problems_of(service, ALL, frozenset({"routes"}))
    assert found == [
        "spec.gateway.inferencePool.resources.requests[memory]: 1Gi is above its limit 512Mi; raise the limit"
    ]
