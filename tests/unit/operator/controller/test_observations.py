"""From objects to what the planner wants to know: only what the service owns counts, and pods speak for themselves."""

import pytest

from tandem_operator.builders.naming import labels_of
from tandem_operator.controller.observations import Parts, canaries_by_readiness
from tandem_operator.controller.store import DEPLOYMENT, LEADER_WORKER_SET, POD, SERVICE, WORKER_POOL, Seen
from tandem_operator.planning.observed import Canary
from tandem_testing.kube_objects import a_deployment, a_pod, an_object

OWNER = "uid-of-the-service"


def parts_of(*seen):
    return Parts.of(OWNER, seen)


def only_deployment(*seen):
    (deployment,) = parts_of(a_deployment("chat-prefill-r1", owner=OWNER), *seen).deployments()
    return deployment


def test_foreign_objects_are_not_counted_or_deleted():
    mine, theirs = a_deployment("mine", owner=OWNER), a_deployment("theirs", owner="somebody-else")
    parts = parts_of(mine, theirs, an_object(SERVICE, "nobody's", metadata={"labels": {"tandem.dev/service": "chat"}}))
    assert [one.name for one in parts.deployments()] == ["mine"]
    assert parts.removable() == {mine.ref}


def test_objects_being_deleted_do_not_count():
    going = a_deployment("going", owner=OWNER)
    going.body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert parts_of(going).removable() == frozenset()
    assert parts_of(going).deployments() == ()


def test_pools_are_read_and_never_taken_away():
    pool = an_object(
        WORKER_POOL, "chat-decode", owner=OWNER, spec={"role": "decode", "serviceName": "chat", "replicas": 3}
    )
    assert parts_of(pool).pools() == {"decode": 3}
    assert parts_of(pool).removable() == frozenset()


def test_ready_pods_are_counted_from_pods_not_from_deployment():
    seen = only_deployment(
        a_pod("a"),
        a_pod("b", ready=False),
        a_pod(
            "c",
            metadata={"labels": labels_of("chat", "worker", role="prefill", revision="r1"), "deletionTimestamp": "x"},
        ),
        a_pod("d", status={"phase": "Failed"}),
        a_pod("e", revision="r2"),
        a_pod("f", role="decode"),
    )
    assert (seen.pods, seen.ready) == (2, 1)


def test_scheduler_is_quoted():
    """A node selector that matches nothing is reported in the scheduler's own words [waiting-pods-named]."""
    sentence = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": sentence}]
    assert only_deployment(a_pod("a", status={"conditions": conditions})).failure == sentence


@pytest.mark.parametrize("place", ["containerStatuses", "initContainerStatuses"])
def test_image_pull_failure_is_reported_with_its_container(place):
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    seen = only_deployment(a_pod("a", status={place: [{"name": "worker", "state": waiting}]}))
    assert seen.failure == "worker: ImagePullBackOff: not found"


def test_container_being_created_is_no_failure():
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    assert only_deployment(a_pod("a", status={"containerStatuses": [{"name": "w", "state": waiting}]})).failure == ""


def test_quota_that_stops_the_deployment_is_reported():
    status = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}]}
    (seen,) = parts_of(a_deployment("chat-prefill-r1", owner=OWNER, status=status)).deployments()
    assert seen.failure == "exceeded quota: gpus"


def test_without_canaries_only_a_whole_ready_pair_counts():
    deployments = [
        a_deployment("p1", owner=OWNER),
        a_deployment("d1", owner=OWNER, role="decode"),
        a_deployment("p2", owner=OWNER, revision="r2"),
    ]
    pods = [a_pod("a"), a_pod("b", role="decode"), a_pod("c", revision="r2")]
    assert canaries_by_readiness("chat", parts_of(*deployments, *pods)) == {"r1": Canary(passed=True)}
    gateway = an_object(
        POD,
        "g",
        metadata={"labels": labels_of("chat", "gateway")},
        spec={},
        status={"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    )
    assert set(canaries_by_readiness("chat", parts_of(*deployments, *pods, gateway))) == {"r1", ""}


def test_stored_pod_lacks_unread_fields():
    pod = an_object(
        POD, "p", spec={"containers": [{"name": "w", "env": [{}], "ports": []}], "volumes": [{}]}, status={}
    )
    assert pod.body["spec"] == {"containers": [{"name": "w", "ports": []}]}
    assert DEPLOYMENT.path("models", "d", "scale") == "/apis/apps/v1/namespaces/models/deployments/d/scale"
    assert POD.path(None) == "/api/v1/pods"


def a_group(replicas: int = 2, **update: int):
    spec = {"replicas": replicas, "rolloutStrategy": {"rollingUpdateConfiguration": update}}
    labels = labels_of("chat", "worker", role="decode", revision="r1")
    return an_object(LEADER_WORKER_SET, "chat-decode-r1", owner=OWNER, metadata={"labels": labels}, spec=spec)


def test_group_counts_its_leader_and_reports_failed_followers():
    waiting = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    following = labels_of("chat", "follower", role="decode", revision="r1")
    parts = parts_of(
        a_group(),
        a_pod("g-0", role="decode"),
        a_pod("g-0-1", metadata={"labels": following}),
        a_pod("g-1", role="decode", ready=False),
        a_pod("g-1-1", metadata={"labels": following}, status={"conditions": [waiting]}),
    )
    (seen,) = parts.deployments()
    assert (seen.pods, seen.ready, seen.replicas, seen.role) == (2, 1, 2, "decode")
    assert (seen.failure, seen.paused) == ("0/3 nodes are available", False)
    assert (seen.ref.kind, seen.ref.api_version) == ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1")
    assert parts_of(a_group(partition=2)).deployments()[0].paused


CHECKS = {"name": "check-arguments", "image": "i:1", "command": ["tandem"], "args": ["--x", "--check-args"]}


@pytest.mark.parametrize(
    ("check", "ended", "ready", "accepted"),
    [
        (CHECKS, {"terminated": {"exitCode": 0}}, False, True),
        (CHECKS, {"terminated": {"exitCode": 2}}, False, False),
        (CHECKS, {"running": {}}, False, False),
        (CHECKS, None, True, True),
        ({**CHECKS, "image": "i:0"}, {"terminated": {"exitCode": 0}}, True, False),
        ({**CHECKS, "args": ["--check-args"]}, {"terminated": {"exitCode": 0}}, True, False),
        (None, None, True, False),
    ],
)
@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_arguments_are_accepted_by_a_pod_of_the_template(check, ended, ready, accepted, kind):
    pod = {"spec": {"initContainers": [CHECKS, {"name": "download"}]}}
    statuses = {} if ended is None else {"initContainerStatuses": [{"name": CHECKS["name"], "state": ended}]}
    there = a_pod("a", ready=ready, status=statuses)
    body = {**there.body, "spec": {"containers": [], "initContainers": [check] if check else []}}
    if kind == "Deployment":
        made = a_deployment("chat-prefill-r1", owner=OWNER)
        made.body["spec"]["template"] = pod
    else:
        labels = labels_of("chat", "worker", role="prefill", revision="r1")
        spec = {"replicas": 1, "leaderWorkerTemplate": {"leaderTemplate": pod}}
        made = an_object(LEADER_WORKER_SET, "chat-prefill-r1", owner=OWNER, metadata={"labels": labels}, spec=spec)
    (seen,) = parts_of(made, Seen.of(body)).deployments()
    assert seen.accepted == (("--x", "--check-args") if accepted else ())
