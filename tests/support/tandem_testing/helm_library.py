"""The Helm library in a process of its own (`tools/helm`): it needs a newer Python, and takes seconds to load."""

import json
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_testing.skip_lines import at_one_place

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHARTS = ROOT / "charts"
HOME = Path(os.environ.get("TANDEM_HELM_HOME", "~/.cache/tandem-helm")).expanduser()

NOT_RUN = "CHARTS WERE NOT RENDERED BY HELM"
NEEDS_HELM = pytest.mark.skipif(
    # `make test-kube` sets the variable: then its absence is an error and no reason to skip.
    not (HOME / "ready").exists() and "TANDEM_KUBE_REQUIRED" not in os.environ,
    reason=f"{NOT_RUN}: no Helm library in {HOME}; `make test-kube` puts it there",
)


class HelmError(Exception):
    """Helm's output."""


class HelmLibrary:
    """One process that answers requests. Close it."""

    def __init__(self) -> None:
        command = [str(HOME / "python"), str(ROOT / "tools" / "helm" / "helm.py")]
        # Helm reads these; a developer's own have no place in tests.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBECONFIG"))}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def ask(self, do: str, **request: object) -> Any:
        """Carries out a request of `tools/helm/helm.py`. Raises `HelmError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the Helm process ended with {self._process.poll()}"
        answer = json.loads(line)
        if "error" in answer:
            raise HelmError(answer["error"])
        return answer["ok"]

    def render(
        self,
        chart: str,
        values: Json | None = None,
        *,
        release: str = "tandem",
        namespace: str = "tandem-system",
        kube: str = "1.36.0",
        without: tuple[str, ...] = (),
    ) -> list[Json]:
        """Manifests of a chart of ours, as `helm template` would print them."""
        return list(yaml.safe_load_all(self._rendered(chart, values, release, namespace, kube, without)["manifest"]))

    def notes(
        self,
        chart: str,
        values: Json | None = None,
        *,
        release: str = "tandem",
        namespace: str = "tandem-system",
        kube: str = "1.36.0",
        without: tuple[str, ...] = (),
    ) -> str:
        """The notes after an install."""
        notes: str = self._rendered(chart, values, release, namespace, kube, without)["notes"]
        return notes

    def _rendered(
        self, chart: str, values: Json | None, release: str, namespace: str, kube: str, without: tuple[str, ...]
    ) -> Json:
        rendered: Json = self.ask(
            "render",
            chart=str(CHARTS / chart),
            values=values or {},
            release=release,
            namespace=namespace,
            kube=kube,
            without=list(without),
        )
        return rendered


@pytest.fixture(scope="session")
def helm() -> Iterator[HelmLibrary]:
    """One process for all tests of a worker."""
    library = HelmLibrary()
    yield library
    library.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """For a conftest: tests that are skipped for want of Helm are skipped at one place: one line of the report."""
    return at_one_place((yield), NOT_RUN, __file__)
