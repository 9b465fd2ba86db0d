"""Charts in a real OCI registry: what tools/release/charts.py pushes is what it packaged."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.helm_library import ROOT
from tandem_testing.neighbours import NEEDS_NEIGHBOURS, Registry, registry
from tandem_testing.signing_keys import signing_key

pytestmark = NEEDS_NEIGHBOURS

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
PROVENANCE = "application/vnd.cncf.helm.chart.provenance.v1.prov"


def charts(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of tools/release/charts.py."""
    command = [sys.executable, str(ROOT / "tools/release/charts.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def packaged(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("packaged")
    done = charts("package", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def served(tmp_path):
    with registry(tmp_path) as one:
        yield one


def manifest_of(served: Registry, reference: str) -> dict:
    """Of a chart, as the registry has it."""
    name, _, tag = reference.rpartition(":")
    answer = served.api.get(f"/v2/{name}/manifests/{tag}", headers={"Accept": MANIFEST})
    return answer.raise_for_status().json()


def push(folder: Path, served: Registry) -> subprocess.CompletedProcess[str]:
    return charts("push", str(folder), f"oci://{served.host}/charts", SSL_CERT_FILE=str(served.authority))


def test_pushed_charts_are_the_packaged_archives(packaged, served):
    done = push(packaged, served)
    assert done.returncode == 0, done.stderr
    references = [line.removeprefix(f"oci://{served.host}/") for line in done.stdout.split()]
    assert len(references) == len(list(packaged.glob("*.tgz"))) == 2
    for reference in references:
        archive = packaged / f"{reference.removeprefix('charts/').replace(':', '-')}.tgz"
        manifest = manifest_of(served, reference)
        [layer] = manifest["layers"]
        assert layer["mediaType"] == CONTENT
        assert layer["digest"] == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
        name = reference.rpartition(":")[0]
        about = served.api.get(f"/v2/{name}/blobs/{manifest['config']['digest']}").raise_for_status().json()
        assert about["annotations"]["artifacthub.io/license"] == "Apache-2.0"
        assert f"{about['name']}-{about['version']}.tgz" == archive.name


def test_archive_that_was_changed_is_not_pushed(packaged, served, tmp_path):
    for path in packaged.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with next(iter(sorted(tmp_path.glob("*.tgz")))).open("ab") as file:
        file.write(b"x")
    done = push(tmp_path, served)
    assert done.returncode == 1
    assert "is not the file that SHA256SUMS names" in done.stderr
    assert served.api.get("/v2/_catalog").json()["repositories"] == []


def test_signed_charts_are_pushed_with_their_provenance(packaged, served, tmp_path):
    folder = tmp_path / "charts"
    shutil.copytree(packaged, folder)
    with signing_key(tmp_path / "gpg") as key:
        words = [sys.executable, str(ROOT / "tools/release/sign.py"), "sign", str(folder), key.fingerprint]
        subprocess.run(words, check=True, env={**os.environ, "GNUPGHOME": str(key.home)})
    done = push(folder, served)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.split():
        reference = line.removeprefix(f"oci://{served.host}/")
        layers = {one["mediaType"]: one["digest"] for one in manifest_of(served, reference)["layers"]}
        signed = folder / f"{reference.removeprefix('charts/').replace(':', '-')}.tgz.prov"
        assert layers[PROVENANCE] == f"sha256:{hashlib.sha256(signed.read_bytes()).hexdigest()}"
