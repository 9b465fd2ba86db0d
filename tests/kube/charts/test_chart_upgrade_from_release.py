"""`helm upgrade` from the last release to this tree, as docs/install.md has it: first definitions, then both charts."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tandem_testing.control_plane import CRD_FILE, CRDS, KUBE, PATIENCE_S
from tandem_testing.helm_library import CHARTS, NEEDS_HELM, ROOT
from tandem_testing.helm_releases import Release
from tandem_testing.kube_objects import contains
from tandem_testing.long_tests import long_except
from tandem_testing.skew.releases import COMMITS, missing_commits, take
from tandem_testing.waiting import wait_equal

MODEL = {
    "model": {"path": "/opt/tandem/models/tandem-mini"},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 1},
    "engine": {"pageSize": 16},
}
OPERATOR = {"replicas": 3, "podLabels": {"team": "serving"}}


def last_releases() -> list[str]:
    """The newest tag before this tree; until there is one, the commits that stand for releases."""
    command = ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [done.stdout.strip()] if done.returncode == 0 else list(COMMITS)


RELEASES = last_releases()
WHY = "of two releases before this one, the nearer one is upgraded for each change"

pytestmark = [
    *KUBE,
    NEEDS_HELM,
    pytest.mark.skipif(bool(missing_commits(RELEASES)), reason=f"this clone lacks a commit of {', '.join(RELEASES)}"),
]


@pytest.fixture(params=long_except(RELEASES, RELEASES[-1:], why=WHY))
def former(request, control_plane, tmp_path) -> Iterator[Path]:
    """The charts of a former release, whose definitions are in the cluster; afterwards those of this tree are."""
    charts = take(request.param, tmp_path).folder / "charts"
    remove_definitions(control_plane)
    try:
        apply_definitions(control_plane, charts / "tandem" / "crds" / "tandem.dev.yaml")
        yield charts
    finally:
        remove_definitions(control_plane)
        apply_definitions(control_plane, CRD_FILE)


def remove_definitions(cluster) -> None:
    """An API server keeps in `storedVersions` each version in which it may have stored objects: it begins again."""
    definitions = list(yaml.safe_load_all(CRD_FILE.read_text()))
    for one in definitions:
        cluster.api.delete(f"{CRDS}/{one['metadata']['name']}").raise_for_status()
    for one in definitions:
        for version in one["spec"]["versions"]:
            wait_equal(lambda one=one, version=version: is_served(cluster, one, version), False, PATIENCE_S)


def apply_definitions(cluster, file: Path) -> None:
    """As `kubectl apply --server-side --force-conflicts -f` does; they are served, and discovery has them."""
    definitions = list(yaml.safe_load_all(file.read_text()))
    for one in definitions:
        cluster.apply(one, force=True).raise_for_status()
    for one in definitions:
        for version in one["spec"]["versions"]:
            wait_equal(lambda one=one, version=version: is_served(cluster, one, version), True, PATIENCE_S)


def is_served(cluster, definition: dict, version: dict) -> bool:
    """Whether objects are listed, and Helm would find the kind."""
    spec = definition["spec"]
    group = f"/apis/{spec['group']}/{version['name']}"
    if cluster.api.get(f"{group}/{spec['names']['plural']}").status_code != 200:
        return False
    found = cluster.api.get(group)
    return found.status_code == 200 and spec["names"]["kind"] in {one["kind"] for one in found.json()["resources"]}


def rules(cluster, namespace: str) -> list:
    role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{namespace}-tandem-operator"
    return cluster.get(role)["rules"]


def test_both_charts_are_upgraded_with_the_values_they_have(helm, control_plane, namespace, former):
    operator = Release(helm, control_plane, namespace, namespace, "tandem", former)
    model = Release(helm, control_plane, namespace, "chat", "tandem-model", former)
    service = f"/apis/tandem.dev/v1alpha1/namespaces/{namespace}/modelservices/chat"
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{namespace}-tandem-operator"
    operator.install(OPERATOR)
    model.install(MODEL)
    before, granted = control_plane.get(service), rules(control_plane, namespace)

    apply_definitions(control_plane, CRD_FILE)
    kept = control_plane.get(service)
    assert kept["metadata"]["uid"] == before["metadata"]["uid"]
    # New fields may have defaults.
    assert contains(kept["spec"], before["spec"]), "nothing of a former spec is lost"

    operator.upgrade_to(CHARTS)
    template = control_plane.get(deployment)["spec"]
    assert template["replicas"] == 3
    assert template["template"]["metadata"]["labels"]["team"] == "serving"
    wait_equal(lambda: control_plane.get(deployment)["status"].get("availableReplicas"), 3, PATIENCE_S)
    assert len(rules(control_plane, namespace)) >= len(granted)

    model.upgrade_to(CHARTS, {"decode": {"replicas": 2}})
    spec = control_plane.get(service)["spec"]
    assert (spec["prefill"]["replicas"], spec["decode"]["replicas"], spec["engine"]["pageSize"]) == (2, 2, 16)
    assert (operator.revisions(), model.revisions()) == (2, 2)
    model.uninstall()
    operator.uninstall()
