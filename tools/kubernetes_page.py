"""Prints docs/kubernetes-releases.md: what is validated against which release of Kubernetes, and what each removed.

    PYTHONPATH=tests/support .venv/bin/python tools/kubernetes_page.py > docs/kubernetes-releases.md

A test compares the page with what this prints.
"""

from collections.abc import Iterator

import yaml

from tandem_testing.api_schemas import (
    LATER_FIELDS,
    ROOT,
    Kind,
    kinds,
    neighbour_definitions,
    neighbour_schemas,
    own_schemas,
    removed_kinds,
    supported_releases,
)
from tandem_testing.operator_objects import examples, operator_objects

HEAD = """# Kubernetes releases

The charts require Kubernetes {oldest} or later (`kubeVersion`). `tools/kubernetes_page.py` writes this page from the
schemas that the tests use.

## What is validated

Tests validate every object against the OpenAPI definitions of each release from {oldest} to {newest}. Unknown
fields are errors. The definitions come from the PyPI package `kubernetes-validate`, which takes them from each
release of Kubernetes. No release in between is missing. A later release is not validated until the package has it.

| objects | test |
|---|---|
| of the operator, examples, pages, CRDs | `tests/unit/operator/builders/test_kubernetes_releases.py` |
| both charts, with all cases of values and the specs of all examples | `tests/charts/test_chart_rendering.py` |
| `charts/install.yaml` | `tests/charts/test_install_manifest.py` |

A schema has types, required fields and allowed values. It has no rules across fields: those of Tandem's own kinds
run in the CEL engine of `make test-kube`. Its API server is release 1.20 with the custom resource engine of 0.36.
No other release has been run ([tools/kube](../tools/kube/README.md)).
"""

USED = """## Kinds of Kubernetes that are used

| API version | kinds |
|---|---|
"""
LATER = """## Fields that need a later release

Older API servers drop these fields or reject the object. A spec that does not ask for them works on {oldest}.

| field of a pod | since | what asks for it |
|---|---|---|
"""
REMOVED = """## API versions removed by each release

From the difference of the definitions of two releases. Tandem uses none of these API versions.

| release | removed |
|---|---|
"""
NEIGHBOURS = """## Other projects

Objects that Tandem creates for other projects, and examples for them, are validated against the definitions in
[tools/neighbours/crds](../tools/neighbours/README.md). [Neighbours](neighbours.md) tells which of these projects
have been run.

| API version | kind | definition |
|---|---|---|
"""


def page() -> str:
    releases = supported_releases()
    bounds = {"oldest": releases[0], "newest": releases[-1]}
    parts = [HEAD.format(**bounds), USED + "".join(_used()), LATER.format(**bounds) + "".join(_later())]
    return "\n".join([*parts, REMOVED + "".join(_removed()), NEIGHBOURS + "".join(_neighbours())])


def _used() -> Iterator[str]:
    others = own_schemas().keys() | neighbour_schemas().keys()
    installed = yaml.safe_load_all((ROOT / "charts" / "install.yaml").read_text())
    used = {(one["apiVersion"], one["kind"]) for one in (*operator_objects(), *examples(), *installed)}
    yield from _rows(used - others)


def _later() -> Iterator[str]:
    for field, (since, what) in sorted(LATER_FIELDS.items()):
        yield f"| `volumes[].{field}` | {since} | {what} |\n"


def _removed() -> Iterator[str]:
    for release in supported_releases():
        found: dict[str, list[str]] = {}
        for version, kind in sorted(removed_kinds(release)):
            found.setdefault(version, []).append(kind)
        shown = "; ".join(f"`{version}` {', '.join(names)}" for version, names in found.items())
        yield f"| {release} | {shown or 'none'} |\n"


def _neighbours() -> Iterator[str]:
    for one in neighbour_definitions():
        source = one["metadata"].get("annotations", {}).get("tandem.dev/package")
        for version in one["spec"]["versions"]:
            name = f"{one['spec']['group']}/{version['name']}"
            yield f"| `{name}` | {one['spec']['names']['kind']} | {source or 'by hand: no package has it'} |\n"


def _rows(found: set[Kind]) -> Iterator[str]:
    assert found <= kinds(supported_releases()[0]).keys(), "validated otherwise"
    by_version: dict[str, list[str]] = {}
    for version, kind in sorted(found):
        by_version.setdefault(version, []).append(kind)
    for version, names in by_version.items():
        yield f"| `{version}` | {', '.join(names)} |\n"


if __name__ == "__main__":
    print(page(), end="")
