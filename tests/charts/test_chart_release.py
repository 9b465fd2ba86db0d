"""Charts as released artefacts: archives that are equal for equal trees, with what Artifact Hub shows."""

import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_testing.api_schemas import ROOT
from tandem_testing.helm_library import CHARTS, NEEDS_HELM
from tandem_testing.tool_modules import load_tool

NAMES = sorted(path.parent.name for path in CHARTS.glob("*/Chart.yaml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CATEGORIES = {"ai-machine-learning"}


charts = load_tool(ROOT / "tools/release/charts.py")


@pytest.fixture(scope="module")
def packaged(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("packaged")
    charts.package(folder)
    return folder


def about(archive: Path) -> dict[str, Any]:
    """Its Chart.yaml."""
    with tarfile.open(archive) as opened:
        [member] = [one for one in opened.getmembers() if one.name.endswith("/Chart.yaml")]
        file = opened.extractfile(member)
        assert file is not None
        return yaml.safe_load(file.read())


@NEEDS_HELM
def test_equal_trees_give_equal_archives(packaged, tmp_path):
    made = charts.package(tmp_path)
    assert sorted(path.name for path in made) == sorted(f"{name}-{VERSION}.tgz" for name in NAMES)
    for path in [*made, tmp_path / "SHA256SUMS"]:
        assert path.read_bytes() == (packaged / path.name).read_bytes()


@NEEDS_HELM
@pytest.mark.parametrize("name", NAMES)
def test_archive_has_every_file_of_the_chart(packaged, name):
    with tarfile.open(packaged / f"{name}-{VERSION}.tgz") as opened:
        members = opened.getmembers()
        assert {member.mtime for member in members} == {charts.EPOCH}
        for member in members:
            if not member.name.endswith("/Chart.yaml"):
                file = opened.extractfile(member)
                assert file is not None
                assert file.read() == (CHARTS / member.name).read_bytes()
    files = {f"{name}/{path.relative_to(CHARTS / name)}" for path in (CHARTS / name).rglob("*") if path.is_file()}
    assert {member.name for member in members} == files


@NEEDS_HELM
@pytest.mark.parametrize("name", NAMES)
def test_archives_chart_has_the_products_version_and_license(packaged, name):
    found = about(packaged / f"{name}-{VERSION}.tgz")
    assert (found["version"], found["appVersion"]) == (VERSION, VERSION)
    notes = found["annotations"]
    assert notes["artifacthub.io/license"] == "Apache-2.0"
    assert notes["artifacthub.io/category"] in CATEGORIES
    for one in yaml.safe_load(notes["artifacthub.io/links"]):
        assert one.keys() == {"name", "url"}
        path = one["url"].partition("/blob/main/")[2]
        assert (ROOT / path).exists(), one
    changed = yaml.safe_load(notes["artifacthub.io/changes"])
    assert changed
    assert {one["kind"] for one in changed} <= {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert all(0 < len(one["description"]) <= charts.MAX_DESCRIPTION for one in changed)


@NEEDS_HELM
def test_images_are_those_that_the_operator_starts(packaged):
    found = yaml.safe_load(about(packaged / f"tandem-{VERSION}.tgz")["annotations"]["artifacthub.io/images"])
    images = {one["image"] for one in found}
    install = yaml.safe_load_all((CHARTS / "install.yaml").read_text())
    [deployment] = [one for one in install if one["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] in images
    # docker/build.sh names what is built.
    assert {image.partition("/tandem-serving/")[2] for image in images} == {
        *(f"{name}:{VERSION}" for name in ("engine", "services", "operator", "redis")),
        f"engine:{VERSION}-cuda",
    }


@NEEDS_HELM
def test_every_definition_is_listed(packaged):
    found = yaml.safe_load(about(packaged / f"tandem-{VERSION}.tgz")["annotations"]["artifacthub.io/crds"])
    there = list(yaml.safe_load_all((CHARTS / "tandem/crds/tandem.dev.yaml").read_text()))
    assert {(one["name"], one["kind"]) for one in found} == {
        (one["metadata"]["name"], one["spec"]["names"]["kind"]) for one in there
    }
    assert all(one["description"] for one in found)


def test_other_version_than_the_products_is_refused(tmp_path):
    shutil.copytree(CHARTS / "tandem-model", tmp_path / "tandem-model")
    file = tmp_path / "tandem-model" / "Chart.yaml"
    file.write_text(file.read_text().replace(f"appVersion: {VERSION}", "appVersion: 9.9.9"))
    with pytest.raises(charts.ReleaseError, match=r"tandem-model/Chart.yaml: appVersion is 9\.9\.9, the product's is"):
        charts.package(tmp_path / "made", tmp_path)


def test_registry_without_its_scheme_is_refused(tmp_path):
    with pytest.raises(charts.ReleaseError, match="expected oci://HOST/PATH"):
        charts.push(tmp_path, "registry.example/charts")


def test_changes_are_first_sentences_without_links():
    text = """# Changelog

## 1.0

### Added
- One `thing` ([page](a.md),
  [ADR 1](b.md)). More.

### Fixed
- Two: 1.5 is it.

## 0.9

### Added
- Old.
"""
    assert list(charts.changes(text)) == [
        {"kind": "added", "description": "One thing"},
        {"kind": "fixed", "description": "Two: 1.5 is it"},
    ]
