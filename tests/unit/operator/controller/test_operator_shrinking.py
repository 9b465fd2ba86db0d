"""Pods get their deletion costs before replicas decrease, for any reason: the emptiest go first."""

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.controller.reconcile import costs_before
from tandem_operator.controller.store import DEPLOYMENT
from tandem_operator.planning.observed import DeploymentSeen, Observed
from tandem_operator.planning.plan import Plan, Scaling
from tandem_operator.telemetry.samples import LoadReading
from tandem_testing.pod_builders import pod, worker

FULL, EMPTY = pod("full"), pod("empty")
SEEN = LoadReading(load=None, workers={"full": worker(running=7), "empty": worker()})


def observed(replicas):
    seen = DeploymentSeen(name="chat-decode-r1", replicas=replicas, role="decode", revision="r1")
    return Observed(now="", deployments=(seen,))


def scaled_to(replicas):
    scaling = Scaling(ref=DEPLOYMENT.ref("chat-decode-r1"), replicas=replicas)
    return Plan(scale=(scaling,), status=ModelServiceStatus())


def applied_with(replicas):
    labels = {"tandem.dev/role": "decode"}
    metadata = {"name": "chat-decode-r1", "labels": labels}
    manifest = {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}}
    return Plan(apply=(manifest,), status=ModelServiceStatus())


def costs(plan, pods=(FULL, EMPTY), replicas=2):
    return costs_before(plan, observed(replicas), pods, SEEN)


def test_least_loaded_pod_has_the_lowest_deletion_cost():
    for plan in (scaled_to(1), applied_with(1)):
        found = costs(plan)
        assert found.get("empty", 0) < found["full"]


def test_deletion_costs_are_set_only_for_partial_scale_down():
    for plan in (scaled_to(2), scaled_to(3), scaled_to(0), applied_with(2)):
        assert costs(plan) == {}


def test_pods_of_others_are_left_alone():
    others = (
        pod("p", role="prefill"),
        pod("new", revision="r2"),
        pod("going", terminating=True),
        pod("g", role="gateway"),
    )
    assert costs(scaled_to(1), others) == {}


def test_costs_that_are_noted_already_are_not_written_again():
    noted = pod("full", deletion_cost=costs(scaled_to(1))["full"])
    assert "full" not in costs(scaled_to(1), (noted, EMPTY))
