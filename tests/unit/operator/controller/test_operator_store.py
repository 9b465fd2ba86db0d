"""What is known of the cluster: the newest of each object, whatever order news come in."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.controller.store import DEPLOYMENT, SERVICE, TOMBSTONE_S, ServiceKey, Store
from tandem_testing.kube_objects import a_deployment, a_service, an_object

CHAT = ServiceKey("models", "chat")
LABELS = {"labels": {"tandem.dev/service": "chat"}}


def a_part(version: int, name: str = "chat-gateway", uid: str = "u1", **metadata):
    return an_object(SERVICE, name, version=version, metadata={**LABELS, "uid": uid, **metadata})


def test_older_news_change_nothing():
    store = Store()
    assert store.put(a_part(7))
    assert not store.put(a_part(6))
    assert not store.put(a_part(7))
    assert [one.version for one in store.parts(CHAT)] == [7]


def test_late_event_does_not_revive_a_deleted_object():
    now = 0.0
    store = Store(lambda: now)
    store.put(a_part(7))
    store.drop(a_part(8))
    assert not store.put(a_part(7))
    assert store.parts(CHAT) == []
    assert store.put(a_part(9, uid="u2"))
    store.drop(a_part(8))
    assert [one.uid for one in store.parts(CHAT)] == ["u2"]
    now = TOMBSTONE_S + 1
    store.replace(SERVICE, None, [a_part(9, uid="u2")], 9)
    assert store.put(a_part(10, uid="u1", name="another"))


def test_object_that_regains_the_label_is_stored_again():
    """Regression: a watch by label calls the first a deletion, and the object was applied again at each
    reconciliation."""
    store = Store()
    store.put(a_part(7))
    store.drop(a_part(8))
    assert store.put(a_part(9))
    assert [one.version for one in store.parts(CHAT)] == [9]


def test_full_list_drops_objects_deleted_unwatched():
    store = Store()
    store.put(a_part(3))
    store.put(a_part(4, name="chat-redis", uid="u2"))
    deployment = a_deployment("chat-prefill-r1", owner="x")
    store.put(deployment)
    news = store.replace(SERVICE, None, [a_part(4, name="chat-redis", uid="u2")], 10)
    assert [one.ref.name for one in news] == ["chat-gateway"]
    assert {one.ref.name for one in store.parts(CHAT)} == {"chat-redis", "chat-prefill-r1"}


def test_list_that_is_older_than_an_object_does_not_take_it_away():
    store = Store()
    store.put(a_part(12))
    assert store.replace(SERVICE, None, [], 11) == []
    assert len(store.parts(CHAT)) == 1


def test_list_of_one_namespace_keeps_other_namespaces():
    store = Store()
    store.put(a_part(3))
    assert store.replace(SERVICE, "elsewhere", [], 10) == []


def test_relabeled_object_belongs_to_new_service():
    store = Store()
    store.put(a_part(3))
    store.put(a_part(4, labels={"tandem.dev/service": "search"}))
    assert store.parts(CHAT) == []
    assert len(store.parts(ServiceKey("models", "search"))) == 1


def test_service_is_itself_whatever_its_labels_say():
    store = Store()
    store.put(a_service("search", metadata=LABELS))
    assert [one.key for one in store.services()] == [ServiceKey("models", "search")]
    assert store.service(CHAT) is None
    assert store.parts(CHAT) == []


@given(st.permutations([("put", 1), ("put", 2), ("put", 3), ("put", 4)]), st.booleans())
def test_any_order_of_news_ends_in_the_same_state(news, gone):
    store = Store()
    moves = [*news, ("drop", 5)] if gone else list(news)
    for index, (move, version) in enumerate(moves):
        seen = a_part(version)
        if move == "drop":
            store.drop(seen)
        else:
            store.put(seen)
        assert index or store.parts(CHAT)
    assert [one.version for one in store.parts(CHAT)] == ([] if gone else [4])


def test_fingerprints_see_edits_and_not_what_controllers_note():
    spec = {"replicas": 2, "selector": {"matchLabels": {}}}
    before = an_object(DEPLOYMENT, "d", metadata=LABELS, spec=spec)
    noted = {**LABELS, "annotations": {"deployment.kubernetes.io/revision": "2"}, "generation": 4}
    assert (
        an_object(DEPLOYMENT, "d", metadata=noted, spec=spec, status={"replicas": 2}).fingerprint == before.fingerprint
    )
    edited = an_object(DEPLOYMENT, "d", metadata=LABELS, spec={**spec, "replicas": 3})
    assert edited.fingerprint != before.fingerprint
    relabelled = an_object(DEPLOYMENT, "d", metadata={"labels": {**LABELS["labels"], "a": "b"}}, spec=spec)
    assert relabelled.fingerprint != before.fingerprint
