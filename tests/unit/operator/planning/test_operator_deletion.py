"""What a service says that is deleted in the foreground, and what a deleted one has left that does not end."""

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import condition
from tandem_operator.controller.reconcile import Finalizer
from tandem_operator.controller.store import POD, WORKER_POOL, ServiceKey
from tandem_operator.planning.deletion import drain_bound_s, leaving
from tandem_testing.kube_objects import an_object

KEY = ServiceKey("models", "chat")
GRACE_S = 75
BOUND = drain_bound_s(GRACE_S)


class World:
    """Records deletions and events."""

    def __init__(self):
        self.now, self.deleted, self.events = 0.0, [], []
        self.farewells = Finalizer(self, self, lambda: self.now)

    async def delete(self, seen):
        self.deleted.append(seen.ref.name)

    async def post(self, about, event):
        self.events.append((about.ref.name, event.reason))


def gateway(name="chat-gateway-1", *, ends=True):
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if ends else {}
    spec = {"containers": [], "terminationGracePeriodSeconds": GRACE_S}
    return an_object(POD, name, metadata=metadata, spec=spec, status={"phase": "Running"})


def pool(*pods):
    owners = [{"kind": "Pod", "apiVersion": "v1", "name": pod.ref.name, "uid": pod.uid} for pod in pods]
    return an_object(WORKER_POOL, "chat-decode", metadata={"ownerReferences": owners}, spec={"role": "decode"})


async def test_pools_go_when_gateways_outlast_their_bound():
    world, pod = World(), gateway()
    left = [pool(pod), pod]
    step = await world.farewells.step(KEY, left)
    assert (step.wrote, step.again_s, world.deleted) == (False, BOUND, [])
    world.now = BOUND - 1.0
    assert (await world.farewells.step(KEY, left)).again_s == 1.0
    world.now = BOUND
    assert (await world.farewells.step(KEY, left)).wrote
    assert world.deleted == ["chat-decode"]
    assert world.events == [("chat-decode", "DrainTimedOut")]


@pytest.mark.parametrize(
    "left",
    [
        [],
        [pool()],
        [pool(gateway())],
        [pool(gateway(ends=False)), gateway(ends=False)],
        [pool(gateway("a"), gateway("b", ends=False)), gateway("a"), gateway("b", ends=False)],
    ],
    ids=["nothing", "no pods", "pods are gone", "orphaned", "one is served on"],
)
async def test_pool_that_no_ending_gateway_holds_is_left_alone(left):
    world = World()
    for world.now in (0.0, BOUND, 10 * BOUND):
        step = await world.farewells.step(KEY, left)
        assert (step.wrote, step.again_s, world.deleted) == (False, None, [])


def test_status_of_a_deleted_service_reports_deletion_only():
    before = ModelServiceStatus(
        conditions=[condition("Ready", True, "CanaryPassed"), condition("RedisReady", True, "Available")]
    )
    after = leaving(before, 3, "2026-01-01T00:00:00Z")
    assert {one.type: (one.status, one.reason) for one in after.conditions} == {
        "Ready": ("False", "Deleting"),
        "Progressing": ("True", "Deleting"),
        "RedisReady": ("True", "Available"),
    }
    assert leaving(after, 3, "2026-01-01T00:01:00Z") == after
