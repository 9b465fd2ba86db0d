"""Every field of a spec, changed by itself: a real API server stores the spec and all that the operator makes of it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.builders.served import served
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import PRIVILEGES, ClusterApis, OperatorSettings
from tandem_testing.control_plane import KUBE, ControlPlane
from tandem_testing.custom_resources import model_service
from tandem_testing.kube_objects import lost
from tandem_testing.spec_fields import FULL_SPEC, FieldPath, Manifest, leaves, others, with_field

pytestmark = KUBE

SPEC = {**FULL_SPEC, "model": {"claim": {"claimName": "models", "path": "qwen"}}}
"""Image volumes came with 1.31: the API server of the tests drops them."""

OPTIONAL = {"HTTPRoute", "InferencePool", "PodMonitor", "ServiceMonitor"}
"""Kinds that this cluster lacks: `tests/neighbours` stores them."""


def planned(cluster: ControlPlane, namespace: str, spec: Manifest) -> list[Manifest]:
    """What the operator applies; nothing for a spec that it refuses. Raises `ValueError` for what is no spec."""
    apis = ClusterApis(
        http_routes=True,
        inference_pools=True,
        pod_monitors=True,
        pod_disruption_budget=cluster.newest("policy/v1", "policy/v1beta1"),
    )
    settings = OperatorSettings(apis=apis, allow=frozenset(PRIVILEGES))
    service = served("everything", namespace, msgspec.convert(spec, ModelServiceSpec), settings)
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
    return [one for one in plan.apply if one["kind"] not in OPTIONAL]


def stored_changes(cluster: ControlPlane, namespace: str, path: FieldPath, value: Any) -> Iterator[Manifest]:
    """Specs with another value of the field, that the API server stores."""
    collection = cluster.collection(model_service(namespace))
    for other in others(value):
        spec = with_field(SPEC, path, other)
        manifest = {**model_service(namespace, "everything"), "spec": spec}
        answer = cluster.api.post(collection, json=manifest, params={"dryRun": "All", "fieldValidation": "Strict"})
        if answer.status_code == 201:
            yield spec


def test_every_changed_field_is_stored_with_all_that_follows(control_plane, namespace):
    before = planned(control_plane, namespace, SPEC)
    unchanged, refused = [], []
    for path, value in leaves(SPEC):
        name = ".".join(map(str, path))
        changes: list[Manifest] = []
        for spec in stored_changes(control_plane, namespace, path, value):
            changes = [one for one in planned(control_plane, namespace, spec) if one not in before]
            if changes:
                break
        else:
            unchanged.append(name)
        for manifest in changes:
            answer = control_plane.apply(manifest, manager="tandem-operator", dryRun="All")
            if answer.status_code != 201 or lost(manifest, answer.json()):
                refused.append(f"{name}: {manifest['kind']} {manifest['metadata']['name']}: {answer.text}")
    assert refused == [], "\n".join(refused)
    # What these decide is no object: test_operator_fields.py.
    assert unchanged == []
