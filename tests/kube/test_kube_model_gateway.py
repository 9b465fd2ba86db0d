"""A ModelGateway on a real API server: services behind it come and go, and no gateway pod changes."""

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane
from tandem_testing.kube_fronts import FRONT, Front
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE


@pytest.fixture
def front(control_plane: ControlPlane, namespace: str) -> Front:
    return Front(control_plane, namespace)


def test_services_come_and_go_behind_a_model_gateway(services, front, running):
    front.apply(replicas=2)
    front.wait_condition("Ready", "True", "GatewaysReady")
    assert front.served() == {}
    # Gateways are ready as soon as the first pod is.
    wait_equal(lambda: front.status().get("ready"), "2/2", PATIENCE_S)
    before = front.pods()
    assert len(before) == 2

    services.apply("chat", servedModelName="llama", aliases=["gpt"], **FRONT)
    services.apply("search", **FRONT)
    front.wait_served(chat=["llama", "gpt"], search=["search"])
    wait_equal(front.files, {"chat keys", "chat redis-password", "search keys", "search redis-password"}, PATIENCE_S)
    for name in ("chat", "search"):
        services.wait_ready(name)
        assert services.get(name)["status"]["endpoint"] == f"http://front-gateway.{front.namespace}.svc"
        assert f"{name}-gateway" not in services.deployments(name)
    wait_equal(lambda: (front.status().get("served"), front.status().get("ready")), (2, "2/2"), PATIENCE_S)

    services.delete("search")
    front.wait_served(chat=["llama", "gpt"])
    wait_equal(front.files, {"chat keys", "chat redis-password"}, PATIENCE_S)
    assert front.pods() == before
    wait_equal(lambda: {("Normal", "ServiceAdded"), ("Normal", "ServiceRemoved")} <= front.events(), True, PATIENCE_S)


def test_taken_name_is_refused_and_its_first_model_is_served_on(services, front, running):  # [name-served-once]
    front.apply()
    services.apply("chat", servedModelName="llama", **FRONT)
    front.wait_served(chat=["llama"])
    services.apply("other", servedModelName="llama", **FRONT)
    services.wait_condition("RouterReady", "False", "NameTaken", "other")
    front.wait_condition("ServicesServed", "False", "NameTaken")
    assert front.served() == {"chat": ["llama"]}
    services.wait_ready("chat")
    services.apply("other", servedModelName="qwen", **FRONT)
    front.wait_served(chat=["llama"], other=["qwen"])
    services.wait_ready("other")


def test_service_waits_for_its_model_gateway_and_outlives_it(services, front, running):
    services.apply("chat", **FRONT)
    services.wait_condition("RouterReady", "False", "GatewayMissing")
    front.apply()
    services.wait_ready("chat")
    workers = set(services.leaving("worker"))
    front.delete()
    services.wait_condition("RouterReady", "False", "GatewayMissing")
    wait_for(lambda: front.pods() == {}, PATIENCE_S, lambda: str(front.pods()))
    for kind, name in (("configmaps", "front-models"), ("secrets", "front-fleets"), ("secrets", "front-curve")):
        path = f"/api/v1/namespaces/{front.namespace}/{kind}/{name}"
        wait_equal(lambda path=path: front.cluster.api.get(path).status_code, 404, PATIENCE_S)
    assert set(services.leaving("worker")) == workers

    services.apply("chat")
    services.wait_ready("chat")
    assert services.get("chat")["status"]["endpoint"] == f"http://chat-gateway.{front.namespace}.svc"


def test_gateway_fields_in_service_with_gateway_ref_are_invalid(services, front, running):
    front.apply(inferencePool={})
    front.wait_condition("Valid", "False", "InvalidSpec")
    services.apply("chat", gateway={"replicas": 2}, **FRONT)
    services.wait_condition("Valid", "False", "InvalidSpec")
    message = next(one["message"] for one in services.get()["status"]["conditions"] if one["type"] == "Valid")
    assert message.startswith("spec.gateway.replicas: with gatewayRef it is of ModelGateway 'front'")


def test_files_edited_by_hand_are_written_again(services, front, running):
    front.apply()
    services.apply("chat", **FRONT)
    front.wait_served(chat=["chat"])
    path = f"/api/v1/namespaces/{front.namespace}/configmaps/front-models"
    front.cluster.merge(path, {"data": {"models.json": "{}"}}).raise_for_status()
    wait_equal(lambda: front.cluster.get(path)["data"]["models.json"] != "{}", True, PATIENCE_S)
    front.wait_served(chat=["chat"])
