"""Every failure of a reconciliation is in the status: at once if the API server rejects, else if it persists."""

import contextlib
import json

import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.naming import labels_of
from tandem_operator.controller.applier import Applier
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.error_reports import REPORT_AFTER_FAILURES
from tandem_operator.controller.observations import Observations, ObservationStore, Parts
from tandem_operator.controller.reconcile import Reconciler
from tandem_operator.controller.store import ServiceKey, Store
from tandem_operator.planning.plan import Plan, Scaling
from tandem_operator.settings import OperatorSettings
from tandem_testing.kube_objects import a_deployment, a_service

KEY = ServiceKey("models", "chat")
DRY_RUN = "does not support dry run"


class Server:
    """Answers writes with `answers` by kind; remembers those that were sent for good."""

    def __init__(self):
        self.answers, self.written, self.statuses, self.version = {}, [], [], 100
        self.gone, self.deleted = set(), []

    async def get(self, ref, namespace):
        return None

    async def create(self, manifest, *, dry_run=False):
        return await self.apply(manifest, dry_run=dry_run)

    async def apply(self, manifest, *, subresource="", dry_run=False):
        self.version += 1
        if subresource and manifest["kind"] == "ModelService":
            self.statuses.append(json.loads(json.dumps(manifest["status"])))
            return a_service(metadata={"generation": 3}, version=self.version, status=manifest["status"]).body
        if not subresource:
            answer = self.answers.get((manifest["kind"], dry_run)) or self.answers.get((manifest["kind"], None))
            if answer is not None:
                raise answer
            if not dry_run:
                self.written.append(manifest["kind"])
        metadata = {
            "uid": f"uid-{manifest['kind']}-{manifest['metadata']['name']}",
            "resourceVersion": str(self.version),
        }
        return {**manifest, "metadata": {**manifest["metadata"], **metadata}}

    async def scale(self, ref, namespace, replicas, *, dry_run=False):
        if ref.name in self.gone:
            raise ApiError(404, "NotFound", f"{ref.name} not found")

    async def delete(self, ref, namespace, uid, *, dry_run=False):
        if not dry_run:
            self.deleted.append(ref.name)
        return ref.name not in self.gone

    async def existing(self, namespace, names):
        return frozenset(names)

    def forget(self, namespace):
        return None


class World:
    def __init__(self):
        self.server, self.store, self.events = Server(), Store(), []
        observations = ObservationStore()
        observations.put(KEY, Observations())
        applier = Applier(self.server, self.store, self.server)
        settings = OperatorSettings(canaries=False)
        self.reconciler = Reconciler(self.store, observations, applier, self.server, self, settings)
        self.store.put(a_service(metadata={"generation": 3}, version=1))

    async def post(self, about, event):
        self.events.append(event.reason)

    async def reconcile(self):
        """The reason of `Degraded` after one reconciliation; None if it wrote no status."""
        before = len(self.server.statuses)
        with contextlib.suppress(ApiError, ZeroDivisionError):
            await self.reconciler.reconcile(KEY)
        if len(self.server.statuses) == before:
            return None
        status = self.server.statuses[-1]
        assert status["observedGeneration"] == 3
        return next(one["reason"] for one in status["conditions"] if one["type"] == "Degraded")


@pytest.mark.parametrize("status", [400, 403, 422, 500])
@pytest.mark.parametrize("kind", ["WorkerPool", "Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"])
async def test_rejected_object_is_reported_and_none_is_written(kind, status):
    world = World()
    world.server.answers[kind, True] = ApiError(status, "", ".spec.nonsense: field not declared in schema")
    assert await world.reconcile() == "ApplyRefused"
    assert world.server.written == []
    assert world.events.count("ApplyRefused") == 1
    ready = next(one for one in world.server.statuses[-1]["conditions"] if one["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ApplyRefused")
    assert f"{kind} 'chat" in ready["message"]
    assert ".spec.nonsense: field not declared in schema" in ready["message"]
    world.server.answers.clear()
    assert await world.reconcile() == "AllWell"
    assert len(world.server.written) > 10


@pytest.mark.parametrize("status", [404, 409, 429, 503, 504])
async def test_transient_failure_is_reported_when_it_persists(status):
    world = World()
    world.server.answers["Service", None] = ApiError(status, "Busy", "later")
    assert [await world.reconcile() for _ in range(REPORT_AFTER_FAILURES)] == [None] * (REPORT_AFTER_FAILURES - 1) + [
        "ApplyFailed"
    ]
    assert world.events == ["ApplyFailed"]


async def test_unreachable_api_server_is_no_failure_of_a_service():
    world = World()
    world.server.answers["Service", None] = ApiError(0, "TimeoutError", "no answer")
    assert [await world.reconcile() for _ in range(2 * REPORT_AFTER_FAILURES)] == [None] * 2 * REPORT_AFTER_FAILURES


async def test_operator_defect_is_reported():
    world = World()
    world.server.answers["Service", None] = ZeroDivisionError("division by zero")
    assert await world.reconcile() == "OperatorError"
    assert world.events == ["OperatorError"]


async def test_webhook_without_dry_runs_refuses_nothing_beforehand():
    world = World()
    world.server.answers["Service", True] = ApiError(400, "BadRequest", f"admission webhook w {DRY_RUN}")
    assert await world.reconcile() == "AllWell"
    assert "Service" in world.server.written


async def test_rejection_after_the_dry_run_is_reported():
    """A quota that two new objects exceed together."""
    world = World()
    world.server.answers["Service", False] = ApiError(403, "Forbidden", "exceeded quota: one")
    assert await world.reconcile() == "ApplyRefused"


async def test_object_deleted_without_an_event_is_deleted_once():
    """A watch missed its end, so the store has it until the API server denies it."""
    world = World()
    assert await world.reconcile() == "AllWell"
    spec = {"replicas": 0, "selector": {"matchLabels": labels_of("chat", "worker", role="decode")}}
    ghost = a_deployment("chat-decode-former", owner="uid-ModelService-chat", role="decode", revision="r0", spec=spec)
    world.store.put(ghost)
    world.server.gone.add(ghost.ref.name)
    for _ in range(3):
        await world.reconcile()
    assert ghost not in world.store.parts(KEY)
    assert world.server.deleted == [ghost.ref.name]


@pytest.mark.parametrize("exists", [False, True])
async def test_object_that_cannot_be_scaled_leaves_the_store_if_gone(exists):
    """404 alone does not say so: it may be the subresource that is not there."""
    store, server = Store(), Server()
    service = a_service(version=1)
    part = a_deployment("chat-decode-former", owner=service.uid, role="decode", revision="r0")
    store.put(part)
    server.gone.add(part.ref.name)

    async def get(ref, namespace):
        return part.body if exists else None

    server.get = get
    plan = Plan(scale=(Scaling(ref=part.ref, replicas=0),), status=ModelServiceStatus())
    with pytest.raises(ApiError, match="not found"):
        await Applier(server, store, server).apply_plan(service, Parts.of(service.uid, [part]), plan)
    assert store.parts(KEY) == [part] * exists
