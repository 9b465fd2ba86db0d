"""charts/install.yaml: the operator without Helm."""

import os
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tandem_testing.helm_library import CHARTS, NEEDS_HELM, ROOT
from tandem_testing.pod_security import violations

COMMITTED = CHARTS / "install.yaml"
MANIFESTS = list(yaml.safe_load_all(COMMITTED.read_text()))


@NEEDS_HELM
@pytest.mark.xdist_group("helm")
def test_committed_manifest_is_what_the_chart_renders(tmp_path):
    written = tmp_path / "install.yaml"
    command = [sys.executable, str(ROOT / "tools" / "charts" / "install_manifest.py"), str(written)]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert written.read_text() == COMMITTED.read_text(), "run: python tools/charts/install_manifest.py"


@pytest.mark.parametrize("version", ["1.30", "1.36"])
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_it_is_strictly_valid(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


def test_its_namespace_admits_its_pods():
    (namespace,) = [one for one in MANIFESTS if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (deployment,) = [one for one in MANIFESTS if one["kind"] == "Deployment"]
    assert violations(deployment["spec"]["template"]) == []
    assert deployment["metadata"]["namespace"] == namespace["metadata"]["name"]


def test_nothing_in_it_claims_to_be_helms():
    assert "helm.sh" not in COMMITTED.read_text()
    assert "managed-by" not in COMMITTED.read_text()
