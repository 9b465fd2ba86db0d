"""charts/install.yaml: the operator without Helm."""

import os
import subprocess
import sys

import pytest
import yaml

from tandem_testing.api_schemas import all_errors, supported_releases
from tandem_testing.helm_library import CHARTS, NEEDS_HELM, ROOT
from tandem_testing.pod_security import violations

COMMITTED = CHARTS / "install.yaml"
MANIFESTS = list(yaml.safe_load_all(COMMITTED.read_text()))


@NEEDS_HELM
@pytest.mark.xdist_group("helm")
def test_committed_install_manifest_equals_rendered_chart(tmp_path):
    written = tmp_path / "install.yaml"
    command = [sys.executable, str(ROOT / "tools" / "charts" / "install_manifest.py"), str(written)]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert written.read_text() == COMMITTED.read_text(), "run: python tools/charts/install_manifest.py"


@pytest.mark.parametrize("release", supported_releases())
def test_install_manifest_is_strictly_valid(release):
    assert all_errors(MANIFESTS, release) == []


def test_its_namespace_admits_its_pods():
    (namespace,) = [one for one in MANIFESTS if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (deployment,) = [one for one in MANIFESTS if one["kind"] == "Deployment"]
    assert violations(deployment["spec"]["template"]) == []
    assert deployment["metadata"]["namespace"] == namespace["metadata"]["name"]


def test_install_manifest_has_no_helm_labels():
    assert "helm.sh" not in COMMITTED.read_text()
    assert "managed-by" not in COMMITTED.read_text()
