"""Releases of our charts in a real cluster, installed by Helm."""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem_testing.control_plane import ControlPlane
from tandem_testing.helm_library import CHARTS, HelmLibrary


class Release:
    """One release of one chart."""

    def __init__(self, helm: HelmLibrary, cluster: ControlPlane, namespace: str, name: str, chart: str) -> None:
        self._helm = helm
        self._about = {"kubeconfig": str(cluster.kubeconfig), "namespace": namespace, "release": name}
        self._chart = str(CHARTS / chart)

    def install(self, values: dict[str, Any] | None = None) -> None:
        self._helm.ask("install", chart=self._chart, values=values or {}, **self._about)

    def upgrade(self, values: dict[str, Any]) -> None:
        self._helm.ask("upgrade", chart=self._chart, values=values, **self._about)

    def uninstall(self) -> None:
        self._helm.ask("uninstall", **self._about)

    def revisions(self) -> int:
        return len(self._helm.ask("history", **self._about))


@pytest.fixture
def operator(helm: HelmLibrary, control_plane: ControlPlane, namespace: str) -> Iterator[Release]:
    """The chart `tandem` in the test's namespace, looking after this one alone."""
    # Its ClusterRoles would be in the way of other releases of this name.
    release = Release(helm, control_plane, namespace, namespace, "tandem")
    release.install()
    yield release
    release.uninstall()


@pytest.fixture
def second(control_plane: ControlPlane) -> Iterator[str]:
    """One more namespace."""
    made = control_plane.api.post("/api/v1/namespaces", json={"metadata": {"generateName": "second-"}})
    name: str = made.raise_for_status().json()["metadata"]["name"]
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}").raise_for_status()
