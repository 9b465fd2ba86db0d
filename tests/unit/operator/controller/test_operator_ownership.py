"""Owner references of everything that is made for a service, under the rules of Kubernetes' garbage collection.

The collector itself is in tests/kube/test_kube_deletion.py; here every example is taken away, in every order.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.gateway import gateway_labels
from tandem_operator.controller.applier import generated_secret, owners_of
from tandem_operator.controller.observations import Parts
from tandem_operator.controller.store import POD, Seen
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import a_service, an_object

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))
APIS = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True, leader_worker_sets=True)
SETTINGS = OperatorSettings(apis=APIS, allow=frozenset(PRIVILEGES))


class Collector:
    """Objects by UID with the UIDs of their owners; what has owners and none that is there is collected."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[Seen, set[str]]] = {}

    def put(self, body: dict[str, Any]) -> Seen:
        metadata = body["metadata"]
        uid = f"{body['kind']}/{metadata['name']}"
        seen = Seen.of({**body, "metadata": {**metadata, "uid": uid, "resourceVersion": "1"}})
        self.objects[uid] = (seen, {one["uid"] for one in metadata.get("ownerReferences", ())})
        return seen

    def delete(self, uid: str) -> None:
        self.objects.pop(uid)
        while gone := [key for key, (_, owners) in self.objects.items() if owners and not owners & {*self.objects}]:
            for key in gone:
                # A gateway pod takes its time to end.
                self.objects.pop(key)

    def kinds(self) -> set[tuple[str, str]]:
        return {(seen.ref.kind, seen.ref.name) for seen, _ in self.objects.values()}


def brought_up(path: Path) -> Collector:
    """A service of an example with two gateway pods, as the operator leaves it."""
    example = yaml.safe_load(path.read_text())
    plan = make_plan(service_of(example["spec"]), Observed(now=""), ModelServiceStatus(), 1, SETTINGS)
    assert plan.apply, plan.status
    cluster, service = Collector(), a_service("chat")
    cluster.objects[service.uid] = (service, set())
    # Pods are children of a ReplicaSet; that it goes with its Deployment does not make them end at once.
    pods = [an_object(POD, f"gateway-{number}", metadata={"labels": gateway_labels("chat")}) for number in (1, 2)]
    pods = [cluster.put({**pod.body, "status": {"phase": "Running"}}) for pod in pods]
    parts = Parts(owned={}, pods=tuple(pods))
    manifests = [*plan.apply, *(generated_secret(service.key, name) for name in plan.secrets)]
    for manifest in sorted(manifests, key=lambda one: one["kind"] != "WorkerPool"):
        known = [seen for seen, _ in cluster.objects.values()]
        owners = owners_of(service, parts, known, manifest)
        assert [one["uid"] for one in owners if one.get("controller")] == [service.uid]
        cluster.put({**manifest, "metadata": {**manifest["metadata"], "ownerReferences": owners}})
    return cluster


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_owner_references_take_a_service_away_in_order(path):
    cluster = brought_up(path)
    before = cluster.kinds()
    cluster.delete("uid-ModelService-chat")
    left = cluster.kinds()
    assert ("Deployment", "chat-gateway") not in left
    needed = {
        (kind, name) for kind, name in before if kind in ("WorkerPool", "LeaderWorkerSet", "Secret", "NetworkPolicy")
    }
    needed |= {one for one in before if one[0] == "Deployment" and one[1] not in ("chat-gateway", "chat-router")}
    needed |= {one for one in before if one == ("Service", "chat-redis")}
    assert needed <= left
    cluster.delete("Pod/gateway-1")
    assert needed <= cluster.kinds(), "the other one still drains"
    cluster.delete("Pod/gateway-2")
    assert cluster.kinds() == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_objects_deleted_by_hand_take_nothing_with_them(path):
    uids = [uid for uid in brought_up(path).objects if uid != "uid-ModelService-chat"]
    for uid in uids:
        cluster = brought_up(path)
        cluster.delete(uid)
        assert {*cluster.objects} == {"uid-ModelService-chat", *uids} - {uid}
