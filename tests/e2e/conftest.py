"""A cluster with a real node, which `make e2e` has started, and a diary of what happens on it.

Without the cluster these files are not even collected: they are no part of `make test`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_testing.control_plane import ControlPlane, client_of, install_crds
from tandem_testing.e2e.diary import Diary
from tandem_testing.waiting import wait_for

KUBECONFIG = os.environ.get("TANDEM_E2E_KUBECONFIG")
LOG = Path(os.environ.get("TANDEM_E2E_LOG", "results/e2e.json"))
collect_ignore_glob = [] if KUBECONFIG else ["test_*.py"]

DIARY = pytest.StashKey[Diary]()


@pytest.fixture(scope="session")
def diary(pytestconfig: pytest.Config, control_plane: ControlPlane) -> Diary:
    """Printed at the end of the session."""
    info = control_plane.get("/api/v1/nodes")["items"][0]["status"]["nodeInfo"]
    names = ("kubeletVersion", "containerRuntimeVersion", "kernelVersion", "osImage")
    kept = Diary(versions={"kubernetes": control_plane.version, **{name: info[name] for name in names}})
    pytestconfig.stash[DIARY] = kept
    return kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The diary, for people and as JSON."""
    kept = config.stash.get(DIARY, None)
    if kept is not None:
        terminalreporter.section("end to end")
        for line in kept.lines():
            terminalreporter.line(line)
        kept.write(LOG)
        terminalreporter.line(f"kept in {LOG}")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """The running cluster, with the CRDs of the chart."""
    assert KUBECONFIG is not None, "collected by mistake"
    path = Path(KUBECONFIG)
    with client_of(path) as api:
        version = api.get("/version").raise_for_status().json()["gitVersion"]
        cluster = ControlPlane(kubeconfig=path, version=version, api=api)
        install_crds(cluster)
        yield cluster


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """One for all tests of a file, named like it."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    control_plane.apply(manifest).raise_for_status()
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_for(lambda: control_plane.api.get(account).status_code == 200, 60.0, lambda: f"{account} does not appear")
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}").raise_for_status()
    path = f"/api/v1/namespaces/{name}"
    wait_for(lambda: control_plane.api.get(path).status_code == 404, 180.0, lambda: json.dumps(control_plane.get(path)))
