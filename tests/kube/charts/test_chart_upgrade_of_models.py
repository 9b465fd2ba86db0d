"""`helm upgrade` of what serves (RELIABILITY 38): another model, another image, definitions with another field.

Under load, with containers: tests/e2e. Here: what is exchanged, in which order, and that no part is ever short.
"""

import copy

import pytest
import yaml

from tandem_testing.control_plane import CRD_FILE, KUBE, PATIENCE_S
from tandem_testing.helm_library import NEEDS_HELM
from tandem_testing.helm_releases import Release
from tandem_testing.kube_availability import watched
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_for

pytestmark = [*KUBE, NEEDS_HELM]

TWO = {"replicas": 2}
VALUES = {
    "model": {"path": "/opt/tandem/models/tandem-mini"},
    "prefill": TWO,
    "decode": TWO,
    "gateway": TWO,
}


@pytest.fixture
def services(control_plane, namespace):
    return Services(control_plane, namespace)


@pytest.fixture
def release(helm, control_plane, namespace, services, tmp_path):
    """A model of the chart, served by an operator."""
    flags = ("--namespaces", namespace, "--no-leader-elect")
    with operator(control_plane.kubeconfig, tmp_path / "operator.log", *flags):
        release = Release(helm, control_plane, namespace, "chat", "tandem-model")
        release.install(VALUES)
        services.wait_ready()
        yield release
        release.uninstall()
        wait_for(services.gone, PATIENCE_S)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "/opt/tandem/models/tandem-mini-eagle"}},
        {"images": {"engine": "registry.example/tandem/engine:next"}},
    ],
    ids=["model", "image"],
)
def test_another_model_or_image_comes_pair_by_pair_and_goes_back(release, services, change):
    (old,) = services.workers("decode")
    with watched(services) as fewest:
        for values in ({**VALUES, **change}, VALUES):
            release.upgrade(values)
            services.wait_ready()
            wait_for(lambda: len(services.workers("decode")) == 1, PATIENCE_S, lambda: str(services.workers("decode")))
    assert services.workers("decode") == services.workers("prefill") == {old: 2}
    assert len(services.get()["status"]["history"]) == 1, "there was another revision in between"
    assert fewest == {"prefill": 2, "decode": 2, "gateway": 2}


def test_a_setting_is_carried_out_within_the_revision_one_pod_at_a_time(release, services):
    revisions = services.workers("decode").keys()
    before = {one["metadata"]["uid"] for one in services.pods("worker")}
    with watched(services) as fewest:
        release.upgrade({**VALUES, "drainSeconds": 33})
        services.wait_ready()
        wait_for(lambda: not before & {one["metadata"]["uid"] for one in services.pods("worker")}, PATIENCE_S)
    assert services.workers("decode").keys() == revisions
    assert fewest == {"prefill": 2, "decode": 2, "gateway": 2}


def test_definitions_with_another_field_leave_what_serves_alone(release, services):
    """As docs/install.md has it: definitions first, and the operator that knows their fields later."""
    before = {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")}
    (service, _) = definitions = list(yaml.safe_load_all(CRD_FILE.read_text()))
    assert service["spec"]["names"]["kind"] == "ModelService"
    changed = copy.deepcopy(service)
    properties = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    properties["color"] = {"type": "string", "description": "Of the next release."}
    try:
        services.cluster.apply(changed, force=True).raise_for_status()

        def known() -> bool:
            answer = services.cluster.merge(services.path(), {"spec": {"color": "green"}}).raise_for_status()
            return bool(answer.json()["spec"].get("color"))

        wait_for(known, PATIENCE_S)
        # An operator that does not know the field says so, as soon as its watch tells; what runs goes on either way.
        services.cluster.merge(services.path(), {"spec": {"color": None}}).raise_for_status()
        services.wait_ready()
    finally:
        for one in definitions:
            services.cluster.apply(one, force=True).raise_for_status()
    assert {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")} == before
    assert services.condition("Valid") == ("True", "SpecAccepted")
