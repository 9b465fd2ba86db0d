"""Every field of a spec does something: a field that is accepted and means nothing is a promise that is not kept."""

from typing import Any

import msgspec
import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.naming import ROLE_LABEL
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_testing.kube_cluster import service_of
from tandem_testing.spec_fields import FULL_SPEC, leaves, others, with_field

APIS = ClusterApis(http_routes=True, inference_pools=True, pod_monitors=True)
SETTINGS = OperatorSettings(apis=APIS, allow=frozenset(PRIVILEGES))
ELSEWHERE = {
    "images.redis": "of a managed Redis; this one is external",
    "prefill.replicas": "the pools', where somebody scales them",
    "decode.replicas": "the same",
    "autoscaling.periodSeconds": "of the pod poller: test_pod_poller.py",
    "rollout.history": "of a status that has one: test_operator_plan.py",
    "rollout.canaryTimeoutSeconds": "of the canary book: test_operator_canaries.py",
}
PODS = {"prefill": {"prefill"}, "decode": {"decode"}, "gateway": {"gateway", "router"}}
"""Parts of a spec, and whose pods they are about."""


def outcome(spec: dict[str, Any]) -> tuple[Any, ...]:
    """All that comes of it. Raises where it is no spec."""
    service = service_of(spec)
    observed = Observed(now="2026-01-01T00:00:00Z", pools={"prefill": 2, "decode": 2})
    plan = make_plan(service, observed, ModelServiceStatus(), 1, SETTINGS)
    return plan.apply, plan.scale, plan.secrets, plan.status.conditions, scaling_config(service)


BEFORE = outcome(FULL_SPEC)
FIELDS = [(".".join(map(str, path)), path, value) for path, value in leaves(FULL_SPEC)]


@pytest.mark.parametrize(("name", "path", "value"), FIELDS, ids=[name for name, _, _ in FIELDS])
def test_each_changed_spec_field_changes_the_plan(name, path, value):
    accepted = 0
    for other in others(value):
        try:
            after = outcome(with_field(FULL_SPEC, path, other))
        except (msgspec.ValidationError, ValueError):
            continue
        accepted += 1
        if after != BEFORE:
            assert name not in ELSEWHERE
            return
    assert accepted, "no other value is accepted: name one in `others`"
    assert name in ELSEWHERE, "it means nothing"


def pods(spec: dict[str, Any]) -> dict[str, Any]:
    """Name and pods of each Deployment, by role or component. The name of workers ends with their revision."""
    deployments = [one for one in outcome(spec)[0] if one["kind"] == "Deployment"]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in deployments]
    owners = [each.get(ROLE_LABEL, each["app.kubernetes.io/component"]) for each in labels]
    return {
        owner: (one["metadata"]["name"], one["spec"]["template"])
        for owner, one in zip(owners, deployments, strict=True)
    }


@pytest.mark.parametrize("part", PODS)
def test_fields_of_one_part_change_no_pods_of_another(part):
    before, reached = pods(FULL_SPEC), set()
    for path, value in leaves(FULL_SPEC[part], (part,)):
        for other in others(value):
            try:
                after = pods(with_field(FULL_SPEC, path, other))
            except (msgspec.ValidationError, ValueError):
                continue
            same = [owner for owner in after if owner in before and after[owner][0] == before[owner][0]]
            changed = {owner for owner in same if after[owner] != before[owner]}
            assert changed <= PODS[part], (path, other)
            reached |= changed
    assert reached == PODS[part]
