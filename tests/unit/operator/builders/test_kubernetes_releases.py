"""Objects of the operator, examples and pages against each supported Kubernetes release, strictly and offline."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_operator.api.crds import crds
from tandem_testing.api_schemas import (
    LATER_FIELDS,
    all_errors,
    errors,
    kinds,
    minor_of,
    neighbour_definitions,
    neighbour_schemas,
    own_schemas,
    packaged_releases,
    removed_kinds,
    supported_releases,
)
from tandem_testing.operator_objects import examples, literal_kinds, operator_objects

ROOT = Path(__file__).resolve().parents[4]
PAGES = sorted(
    path
    for folder in ("", "docs", "charts/tandem", "charts/tandem-model", "operator", "services", "tools/kube", "docker")
    for path in (ROOT / folder).glob("*.md")
)
INDENTED = re.compile(r"(?:^(?: {4}.*|)\n)+", re.MULTILINE)
FENCED = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
each_release = pytest.mark.parametrize("release", supported_releases())


def expected(error: str, release: str) -> bool:
    """Whether an older release lacks a field that only some specs ask for (docs/kubernetes-releases.md)."""
    return any(
        minor_of(release) < minor_of(since)
        and f"Additional properties are not allowed ('{field}' was unexpected)" in error
        for field, (since, _) in LATER_FIELDS.items()
    )


def blocks(page: Path) -> Iterator[dict[str, Any]]:
    """Manifests in the page's YAML: fenced and indented blocks that begin with an apiVersion."""
    text = page.read_text()
    found = FENCED.findall(text)
    found += [re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in INDENTED.findall(text)]
    for block in found:
        if re.match(r"\s*apiVersion: \S+\n", block):
            yield from (one for one in yaml.safe_load_all(block) if one is not None)


@each_release
def test_objects_of_the_operator_are_strictly_valid(release):
    assert [error for error in all_errors(operator_objects(), release) if not expected(error, release)] == []


@each_release
def test_examples_are_strictly_valid(release):
    assert all_errors(examples(), release) == []


@each_release
def test_definitions_are_strictly_valid(release):
    assert all_errors([*crds(), *neighbour_definitions()], release) == []


def test_manifests_in_pages_are_strictly_valid():
    found = {page.name: list(blocks(page)) for page in PAGES}
    assert sum(map(len, found.values())) >= 2
    for page, manifests in found.items():
        for release in supported_releases():
            assert all_errors(manifests, release) == [], page


def test_every_kind_that_sources_write_is_validated():
    written = literal_kinds()
    assert {"Deployment", "Lease", "Event", "CustomResourceDefinition"} <= written, "they are found"
    assert written - {one["kind"] for one in operator_objects()} == set()


@pytest.mark.parametrize("field", LATER_FIELDS)
def test_later_fields_are_refused_by_the_release_before(field):
    """Otherwise the entry is out of date."""
    since = LATER_FIELDS[field][0]
    before = f"1.{minor_of(since) - 1}"
    assert any(f"('{field}' was unexpected)" in error for error in all_errors(operator_objects(), before))
    assert not any(f"('{field}' was unexpected)" in error for error in all_errors(operator_objects(), since))


@each_release
def test_no_object_is_of_a_removed_api(release):
    used = {(one["apiVersion"], one["kind"]) for one in (*operator_objects(), *examples())}
    gone = {
        kind for each in supported_releases()[: supported_releases().index(release) + 1] for kind in removed_kinds(each)
    }
    assert used & gone == set()
    served = kinds(release).keys() | own_schemas().keys() | neighbour_schemas().keys()
    assert used - served == set()


def test_releases_have_no_gap():
    minors = [minor_of(release) for release in supported_releases()]
    assert minors == list(range(29, minors[-1] + 1))
    assert minors[-1] >= 36
    assert len(packaged_releases()) > len(minors), "the one before is needed for what was removed"


def test_known_removals_are_found():
    """Well-known dates: the reading of the definitions is right."""
    assert ("flowcontrol.apiserver.k8s.io/v1beta3", "FlowSchema") in removed_kinds("1.32")
    assert ("flowcontrol.apiserver.k8s.io/v1beta2", "FlowSchema") in removed_kinds("1.29")
    assert all(("apps/v1", "Deployment") in kinds(release) for release in packaged_releases())


@pytest.mark.parametrize(
    ("change", "error_message"),
    [
        ({"spec": {"replica": 1}}, "'replica' was unexpected"),
        ({"apiVersion": "apps/v1beta1"}, "has no Deployment of apps/v1beta1"),
        ({"spec": {"replicas": "two"}}, 'spec.replicas: "two" is not of types'),
    ],
)
@each_release
def test_wrong_manifests_are_refused(change, error_message, release):
    """The check itself can fail."""
    manifest = next(one for one in operator_objects() if one["kind"] == "Deployment")
    broken = {**manifest, **change, "spec": {**manifest["spec"], **change.get("spec", {})}}
    assert any(error_message in error for error in errors(broken, release))


@pytest.mark.parametrize("kind", sorted(neighbour_schemas()), ids=lambda kind: kind[1])
def test_unknown_fields_of_neighbours_are_refused(kind):
    manifest = {"apiVersion": kind[0], "kind": kind[1], "metadata": {"name": "x"}, "spec": {"unheardOf": 1}}
    assert any("'unheardOf' was unexpected" in error for error in errors(manifest, supported_releases()[-1]))


def test_neighbours_definitions_name_their_source():
    for path in sorted((ROOT / "tools/neighbours/crds").glob("*.yaml")):
        text = path.read_text()
        if "tandem.dev/package" in yaml.safe_load(text)["metadata"].get("annotations", {}):
            assert text.startswith("# Written by tools/neighbours/write_crds.py")
        else:
            assert "by hand" in text.splitlines()[0]
            assert "No package has it." in "".join(text.splitlines(keepends=True)[:3])
