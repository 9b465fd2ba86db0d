"""What a change of a service or of a ModelGateway concerns, and whose pods are polled for a service."""

from itertools import pairwise
from typing import Any

from tandem_operator.api.model_gateway import ReferringService
from tandem_operator.controller.canary_runner import CanaryRequest, RevisionCanaries
from tandem_operator.controller.gateway_reconcile import service_events
from tandem_operator.controller.model_gateways import gateway_seen, model_at, namesakes, polled_pods
from tandem_operator.controller.store import (
    CONFIG_MAP,
    MODEL_GATEWAY,
    POD,
    SECRET,
    WORKER_POOL,
    Seen,
    ServiceKey,
    Store,
)
from tandem_operator.planning.observed import Canary
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.worker_control import ModelAt
from tandem_testing.kube_objects import a_pod, a_service, an_object
from tandem_testing.pod_builders import pod

FRONT = ServiceKey("models", "front", "ModelGateway")
CHAT, OTHER = ServiceKey("models", "chat"), ServiceKey("models", "other")


def a_gateway(created: str = "2026-01-01T00:00:00Z", name: str = "front", **status: Any) -> Seen:
    return an_object(MODEL_GATEWAY, name, metadata={"creationTimestamp": created}, spec={}, status=status)


def gateway_pod(label: str, owner: str) -> Seen:
    labels = {f"tandem.dev/{label}": owner, "app.kubernetes.io/component": "gateway"}
    return an_object(POD, f"{owner}-gateway-1", metadata={"labels": labels}, spec={"containers": []}, status={})


def a_store(*more: Seen) -> Store:
    store = Store()
    reference = {"model": {"path": "/m"}, "gatewayRef": {"name": "front"}}
    for seen in (a_service("chat", spec=reference), a_service("other"), *more):
        store.put(seen)
    return store


def test_change_of_a_gateway_concerns_the_services_behind_it():
    store = a_store(a_gateway())
    assert store.related(FRONT) == [CHAT]
    # It may have referred to it before.
    assert store.related(OTHER) == [FRONT]
    assert {seen.key for seen in store.roots()} == {CHAT, OTHER, FRONT}
    assert [seen.key for seen in store.services()] == [CHAT, OTHER]


def test_gateway_objects_map_to_gateway_not_service_of_same_name():
    assert gateway_pod("gateway", "front").key == FRONT
    assert gateway_pod("service", "front").key == ServiceKey("models", "front")


def test_contents_of_secrets_are_compared_and_not_kept():
    old, new = (an_object(SECRET, "front-fleets", data={"a": text}) for text in ("b2xk", "bmV3"))
    assert old.fingerprint != new.fingerprint
    assert "data" not in old.body
    assert an_object(CONFIG_MAP, "front-models", data={"a": "b"}).body["data"] == {"a": "b"}


def test_polled_pods_are_own_workers_and_referenced_gateway():
    pods = (gateway_pod("gateway", "front"), a_pod("w"), gateway_pod("service", "chat"))
    row = {"name": "chat", "served": True, "models": ["chat", "alias"]}
    store = a_store(a_gateway(services=[row]), *pods)
    assert {one.name for one in polled_pods(store, store.service(CHAT))} == {"w", "front-gateway-1"}
    assert model_at(store, store.service(CHAT)) == ModelAt("chat", "models.chat")
    assert model_at(store, store.service(OTHER)) is None


def test_refused_service_polls_no_gateway_of_another_model():
    pods = (gateway_pod("gateway", "front"), a_pod("w"))
    for row in ({"name": "chat", "models": ["taken"], "reason": "NameTaken"}, {"name": "other", "served": True}):
        store = a_store(a_gateway(services=[row]), *pods)
        assert {one.name for one in polled_pods(store, store.service(CHAT))} == {"w"}
        assert model_at(store, store.service(CHAT)) is None


def test_state_of_a_service_is_that_in_the_status_of_its_gateway():
    settings = OperatorSettings()
    assert gateway_seen(a_store(), CHAT, settings) is None
    assert gateway_seen(a_store(a_gateway()), CHAT, settings).reason == "GatewayPending"
    row = {"name": "chat", "reason": "NameTaken", "message": "it is"}
    seen = gateway_seen(a_store(a_gateway(services=[row], endpoint="http://front")), CHAT, settings)
    assert (seen.reason, seen.message, seen.endpoint) == ("NameTaken", "it is", "http://front")
    assert gateway_seen(a_store(a_gateway(services=[row])), OTHER, settings) is None


def test_older_of_a_service_and_a_gateway_keeps_their_common_name():
    key = ServiceKey("models", "chat", "ModelGateway")
    for created, taken in (("1999-01-01T00:00:00Z", CHAT), ("2999-01-01T00:00:00Z", key)):
        store = Store()
        store.put(a_gateway(created, "chat"))
        store.put(a_service(metadata={"creationTimestamp": "2026-01-01T00:00:00Z"}))
        assert bool(namesakes(store, CHAT)) is (taken is CHAT)
        assert bool(namesakes(store, key)) is (taken is key)


def test_pools_of_a_deleted_service_have_its_name():
    key = ServiceKey("models", "chat", "ModelGateway")
    pool = an_object(WORKER_POOL, "chat-decode", metadata={"labels": {"tandem.dev/service": "chat"}})
    store = Store()
    store.put(a_gateway(name="chat"))
    store.put(pool)
    assert namesakes(store, key) == {pool.ref}
    store.drop(pool)
    assert namesakes(store, key) == frozenset()


def test_model_that_a_gateway_does_not_have_yet_has_not_failed():
    book = RevisionCanaries(600.0)
    ask = CanaryRequest("r1", pod("g", "gateway", revision=""), (pod("p", "prefill"), pod("d")))
    book.take(0.0, ask, Canary(passed=False, unserved=True, message="not yet"))
    assert book.results(1.0, ["r1"]) == {}
    book.take(5.0, ask, Canary(passed=True))
    for now in range(10, 60, 5):
        book.take(float(now), ask, Canary(passed=False, unserved=True, message="gone"))
    assert not book.results(60.0, ["r1"])["r1"].passed


def test_services_that_come_go_or_are_refused_are_events():
    chat, refused = ReferringService(name="chat", served=True), ReferringService(name="chat", reason="NameTaken")
    steps = ([], [chat], [chat], [refused], [refused], [chat], [])
    reasons = [[one.reason for one in service_events(a, b)] for a, b in pairwise(steps)]
    assert reasons == [["ServiceAdded"], [], ["NameTaken", "ServiceRemoved"], [], ["ServiceAdded"], ["ServiceRemoved"]]
