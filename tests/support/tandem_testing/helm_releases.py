"""Releases of our charts in a real cluster, installed by Helm.

The cluster of the tests is older than the charts allow (`kubeVersion`), so that line is left out of what is installed.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_testing.control_plane import ControlPlane
from tandem_testing.helm_library import CHARTS, HelmLibrary


class Release:
    """One release of one chart."""

    def __init__(
        self, helm: HelmLibrary, cluster: ControlPlane, namespace: str, name: str, chart: str, charts: Path = CHARTS
    ) -> None:
        self._helm = helm
        self._about = {"kubeconfig": str(cluster.kubeconfig), "namespace": namespace, "release": name}
        self._chart = charts / chart

    def install(self, values: dict[str, Any] | None = None) -> None:
        self._carry_out("install", values or {})

    def upgrade(self, values: dict[str, Any]) -> None:
        self._carry_out("upgrade", values)

    def upgrade_to(self, charts: Path, values: dict[str, Any] | None = None) -> None:
        """The chart of the same name in `charts`, with the values that the release has (`--reuse-values`)."""
        self._chart = charts / self._chart.name
        self._carry_out("upgrade", values or {}, reuse=True)

    def _carry_out(self, do: str, values: dict[str, Any], *, reuse: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            chart = Path(folder) / self._chart.name
            shutil.copytree(self._chart, chart)
            about = (chart / "Chart.yaml").read_text().splitlines(keepends=True)
            kept = [line for line in about if not line.startswith("kubeVersion:")]
            assert len(kept) == len(about) - 1
            (chart / "Chart.yaml").write_text("".join(kept))
            self._helm.ask(do, chart=str(chart), values=values, reuse=reuse, **self._about)

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
