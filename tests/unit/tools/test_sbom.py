"""Bills of materials of images: complete, valid CycloneDX, and equal for equal images."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tandem_testing.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/release/sbom.py"
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u14
Description: GNU C Library
 Several lines.

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tzdata
Status: install ok installed
Architecture: all
Version: 2024a-0+deb12u1
"""


sbom = load_tool(TOOL)


def write_distribution(root: Path, name: str, version: str, more: str = "") -> None:
    folder = root / f"opt/tandem/venv/lib/python3.11/site-packages/{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\nText.\n")


@pytest.fixture
def image(tmp_path) -> Path:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    write_distribution(tmp_path, "pyzmq", "27.1.0", "License-Expression: BSD-3-Clause\n")
    write_distribution(tmp_path, "Jinja2", "3.1.6")
    return tmp_path


def made(image: Path, **how: str) -> dict[str, Any]:
    text = sbom.document(sbom.bill(image, **{"name": "services", "version": "0.1.0", **how}))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return json.loads(text)


def test_all_installed_packages_are_listed(image):
    document = made(image)
    assert {one["purl"] for one in document["components"]} == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64",
        "pkg:deb/debian/tzdata@2024a-0%2Bdeb12u1?arch=all",
        "pkg:pypi/jinja2@3.1.6",
        "pkg:pypi/pyzmq@27.1.0",
    }
    [zmq] = [one for one in document["components"] if one["name"] == "pyzmq"]
    assert zmq["licenses"] == [{"expression": "BSD-3-Clause", "acknowledgement": "declared"}]
    [libc] = [one for one in document["components"] if one["name"] == "libc6"]
    assert libc["properties"] == [{"name": "tandem:debian:source", "value": "glibc"}]


def test_image_depends_on_its_packages(image):
    document = made(image, digest=f"sha256:{'a' * 64}")
    root = document["metadata"]["component"]
    assert (root["type"], root["version"]) == ("container", "0.1.0")
    assert root["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    [tree] = [one for one in document["dependencies"] if one["ref"] == root["bom-ref"]]
    assert set(tree["dependsOn"]) == {one["bom-ref"] for one in document["components"]}


def test_equal_images_give_equal_documents(image):
    assert made(image) == made(image)
    assert made(image)["serialNumber"] != made(image, version="0.1.1")["serialNumber"]
    before = made(image)["serialNumber"]
    write_distribution(image, "idna", "3.10")
    assert made(image)["serialNumber"] != before


def test_folder_without_packages_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is it the root of an image"):
        sbom.bill(tmp_path, name="services", version="0.1.0")


def test_malformed_digest_is_refused(image):
    with pytest.raises(ValueError, match="expected sha256: and 64 hexadecimal digits"):
        sbom.bill(image, name="services", version="0.1.0", digest="sha256:short")


def test_command_lists_every_distribution_of_an_environment(tmp_path):
    """Of this one, with hundreds of licenses as people write them."""
    (tmp_path / "opt").mkdir()
    paths = {Path(str(one.locate_file(""))) for one in distributions()}
    [site] = [path for path in paths if path.name == "site-packages" and Path(sys.prefix) in path.parents]
    (tmp_path / "opt/site").symlink_to(site)
    for path in site.glob("*.dist-info"):
        (tmp_path / "opt" / path.name).symlink_to(path)
    command = [sys.executable, str(TOOL), str(tmp_path), "--name", "x", "--version", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(done.stdout) is None
    found = {one["name"] for one in json.loads(done.stdout)["components"]}
    assert {"msgspec", "fastapi", "kopf", "torch"} <= found
