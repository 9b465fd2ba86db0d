"""Objects for neighbours at a real API server that has their definitions, with strict field validation."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tandem_testing.api_schemas import neighbour_definitions, neighbour_schemas
from tandem_testing.control_plane import CRDS, KUBE, PATIENCE_S, ControlPlane
from tandem_testing.helm_library import HelmLibrary
from tandem_testing.neighbours import NEEDS_NEIGHBOURS
from tandem_testing.operator_objects import examples, operator_objects
from tandem_testing.waiting import wait_equal

pytestmark = [*NEEDS_NEIGHBOURS, *KUBE]


def of_neighbours(helm: HelmLibrary) -> list[dict[str, Any]]:
    """What the operator, the chart and the examples have of these kinds, without their namespaces."""
    monitors = [helm.render("tandem", {"metrics": {"monitor": kind}}) for kind in ("ServiceMonitor", "PodMonitor")]
    everything = (*operator_objects(), *examples(), *(one for rendered in monitors for one in rendered))
    return [one for one in everything if (one["apiVersion"], one["kind"]) in neighbour_schemas()]


@pytest.fixture(scope="module")
def apis(control_plane: ControlPlane) -> Iterator[None]:
    names = [one["metadata"]["name"] for one in neighbour_definitions()]
    for one in neighbour_definitions():
        control_plane.apply(one).raise_for_status()
    for one in neighbour_definitions():
        path = f"/apis/{one['spec']['group']}/{one['spec']['versions'][0]['name']}/{one['spec']['names']['plural']}"
        wait_equal(lambda path=path: control_plane.api.get(path).status_code, 200, PATIENCE_S)
    yield
    for name in names:
        control_plane.api.delete(f"{CRDS}/{name}").raise_for_status()


def applied(cluster: ControlPlane, manifest: dict[str, Any], namespace: str):
    moved = copy.deepcopy(manifest)
    moved["metadata"]["namespace"] = namespace
    return cluster.apply(moved, fieldValidation="Strict")


@pytest.mark.usefixtures("apis")
def test_every_object_is_stored_whole(control_plane, helm, namespace):
    found = of_neighbours(helm)
    assert {one["kind"] for one in found} >= {
        "HTTPRoute",
        "InferencePool",
        "PodMonitor",
        "ServiceMonitor",
        "ScaledObject",
    }
    for number, one in enumerate(found):
        named = {**one, "metadata": {**one["metadata"], "name": f"object-{number}"}}
        answer = applied(control_plane, named, namespace)
        assert answer.status_code in (200, 201), f"{one['kind']} {one['metadata']['name']}: {answer.text}"


@pytest.mark.usefixtures("apis")
def test_unknown_field_is_refused_for_each_kind(control_plane, helm, namespace):
    """Otherwise the test above would pass for whatever it is given."""
    by_kind = {one["kind"]: one for one in of_neighbours(helm)}
    for kind, one in by_kind.items():
        broken = {**one, "spec": {**one["spec"], "unheardOf": 1}}
        answer = applied(control_plane, broken, namespace)
        assert answer.status_code in (400, 500), f"{kind}: {answer.status_code}"
        assert "unheardOf" in answer.text
