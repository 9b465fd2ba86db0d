"""`helm upgrade` of what serves [rolling-loses-nothing]: another model, another image, definitions with another field.

Under load, with containers: tests/e2e. Here: what is exchanged, in which order, and that no part is ever short.
"""

import copy

import pytest
import yaml

from tandem_testing.control_plane import CRD_FILE, KUBE, PATIENCE_S
from tandem_testing.helm_library import NEEDS_HELM
from tandem_testing.helm_releases import Release
from tandem_testing.kube_availability import watched
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = [*KUBE, NEEDS_HELM]

TWO = {"replicas": 2}
VALUES = {
    "model": {"path": "/opt/tandem/models/tandem-mini"},
    "prefill": TWO,
    "decode": TWO,
    "gateway": TWO,
}


@pytest.fixture
def start(operator_kubeconfig, namespace, tmp_path):
    """An operator of this namespace, as a context."""
    return lambda name: operator(
        operator_kubeconfig, tmp_path / f"{name}.log", "--namespaces", namespace, "--no-leader-elect"
    )


@pytest.fixture
def release(helm, control_plane, namespace):
    """A model of the chart, not installed yet."""
    return Release(helm, control_plane, namespace, "chat", "tandem-model")


@pytest.fixture
def served(release, services, start):
    """It is served."""
    with start("operator"):
        release.install(VALUES)
        services.wait_ready()
        yield release
        release.uninstall()
        wait_for(services.gone, PATIENCE_S, services.described)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "/opt/tandem/models/tandem-mini-eagle"}},
        {"images": {"engine": "registry.example/tandem/engine:next"}},
    ],
    ids=["model", "image"],
)
def test_another_model_or_image_comes_pair_by_pair_and_goes_back(served, services, change):
    (old,) = services.workers("decode")
    with watched(services) as fewest:
        for values in ({**VALUES, **change}, VALUES):
            served.upgrade(values)
            services.wait_ready()
            services.wait_one_revision()
    assert services.workers("decode") == services.workers("prefill") == {old: 2}
    assert len(services.get()["status"]["history"]) == 1, "there was another revision in between"
    assert fewest == {"prefill": 2, "decode": 2, "gateway": 2}


def test_setting_change_replaces_pods_one_by_one_in_revision(served, services):
    revisions = services.workers("decode").keys()
    before = {one["metadata"]["uid"] for one in services.pods("worker")}
    with watched(services) as fewest:
        served.upgrade({**VALUES, "drainSeconds": 33})
        services.wait_ready()
        wait_for(
            lambda: not before & {one["metadata"]["uid"] for one in services.pods("worker")},
            PATIENCE_S,
            services.described,
        )
    assert services.workers("decode").keys() == revisions
    assert fewest == {"prefill": 2, "decode": 2, "gateway": 2}


def test_crd_with_new_field_does_not_restart_pods(release, services, start):
    """As docs/install.md has it: the definitions first, then the operator that knows them; models as before
    [definitions-skew].
    """
    definitions = list(yaml.safe_load_all(CRD_FILE.read_text()))
    [service] = [one for one in definitions if one["spec"]["names"]["kind"] == "ModelService"]
    changed = copy.deepcopy(service)
    properties = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    properties["color"] = {"type": "string", "description": "Of the next release."}
    with start("before"):
        release.install(VALUES)
        services.wait_ready()
        before = {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")}
        services.cluster.apply(changed, force=True).raise_for_status()
    try:
        with start("after"):
            wait_equal(lambda: color(services, "green"), "green", PATIENCE_S)
            # To this operator the field is unknown: it reports that, and running pods continue.
            services.wait_condition("Valid", "False", "InvalidSpec")
            color(services, None)
            services.wait_ready()
            assert {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")} == before
            release.uninstall()
            wait_for(services.gone, PATIENCE_S, services.described)
    finally:
        for one in definitions:
            services.cluster.apply(one, force=True).raise_for_status()


def color(services, value):
    """Set the field; what the API server has kept of it."""
    answer = services.cluster.merge(services.path(), {"spec": {"color": value}}).raise_for_status()
    return answer.json()["spec"].get("color")
