"""Manifests against the schemas of every supported Kubernetes release, offline and strictly: unknown fields are errors.

    kind of Kubernetes itself  →  the release's OpenAPI definitions, as PyPI's kubernetes-validate carries them
    kind of tandem.dev         →  our CustomResourceDefinitions
    kind of a neighbour        →  tools/neighbours/crds, which names package and version of each

A kind that none of them knows is an error, so nothing passes unchecked.
"""

import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tandem_operator.api.crds import crds

Json = dict[str, Any]
Kind = tuple[str, str]
"""apiVersion and kind."""

ROOT = Path(__file__).resolve().parents[3]
NEIGHBOURS = ROOT / "tools" / "neighbours" / "crds"
RELEASES = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
RELEASE_NAME = re.compile(r"v1\.(\d+)\.0-local-strict")
OF_REQUESTS = {"DeleteOptions", "Status", "WatchEvent"}
"""Kinds that each group lists and that no manifest has."""

LATER_FIELDS: Mapping[str, tuple[str, str]] = {
    "image": ("1.31", "an OCI image as a volume: `model.image` of a ModelService"),
}
"""Fields of pods that a spec has to ask for → first release that has them, and what asks for them."""


@cache
def packaged_releases() -> tuple[str, ...]:
    """Releases whose definitions the package carries, oldest first: "1.25" and so on."""
    found = (RELEASE_NAME.fullmatch(entry.name) for entry in RELEASES.iterdir())
    return tuple(f"1.{minor}" for minor in sorted(int(match[1]) for match in found if match))


@cache
def supported_releases() -> tuple[str, ...]:
    """From the one that the charts require (`kubeVersion`) to the newest of the package."""
    about = yaml.safe_load((ROOT / "charts/tandem/Chart.yaml").read_text())
    oldest = re.fullmatch(r">=(1\.\d+)\.0-0", about["kubeVersion"])
    assert oldest, about["kubeVersion"]
    return packaged_releases()[packaged_releases().index(oldest[1]) :]


@cache
def definitions(release: str) -> Json:
    """All OpenAPI definitions of a release, by name."""
    text = (RELEASES / f"v{release}.0-local-strict" / "_definitions.json").read_text(encoding="utf-8")
    found: Json = json.loads(text)["$defs"]
    return found


@cache
def kinds(release: str) -> Mapping[Kind, str]:
    """Each kind that a release serves → the name of its definition; lists and bodies of requests are left out."""
    found: dict[Kind, str] = {}
    for name, one in definitions(release).items():
        about = one.get("properties", {})
        for version in about.get("apiVersion", {}).get("enum", ()):
            for kind in about.get("kind", {}).get("enum", ()):
                if not kind.endswith("List") and kind not in OF_REQUESTS:
                    found[version, kind] = name
    return found


def minor_of(release: str) -> int:
    """31 of "1.31"."""
    return int(release.partition(".")[2])


def removed_kinds(release: str) -> set[Kind]:
    """Kinds that the release before had, and this one has not."""
    before = packaged_releases()[packaged_releases().index(release) - 1]
    return kinds(before).keys() - kinds(release).keys()


def errors(manifest: Json, release: str) -> list[str]:
    """What a strict API server of this release would say of the manifest, each with the path of its field."""
    kind = manifest["apiVersion"], manifest["kind"]
    try:
        validator = _validator(kind, release)
    except KeyError:
        return [f"{release} has no {kind[1]} of {kind[0]}"]
    return [f"{'.'.join(map(str, one.instance_path))}: {one.message}" for one in validator.iter_errors(manifest)]


def all_errors(manifests: Iterable[Json], release: str) -> list[str]:
    """Of many: each with kind and name. Equal manifests are checked once."""
    found = []
    for text in {json.dumps(one, sort_keys=True): one for one in manifests}.values():
        name = text["metadata"].get("name", text["metadata"].get("generateName", ""))
        found += [f"{text['kind']} {name}: {error}" for error in errors(text, release)]
    return found


@cache
def _validator(kind: Kind, release: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(_schema(kind, release))


def _schema(kind: Kind, release: str) -> Json:
    """Raises `KeyError` for a kind that nothing here knows."""
    own = own_schemas()
    if kind in own:
        return own[kind]
    if kind in neighbour_schemas():
        return neighbour_schemas()[kind]
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "$ref": f"#/$defs/{kinds(release)[kind]}", "$defs": definitions(release)}


@cache
def own_schemas() -> Mapping[Kind, Json]:
    """Of tandem.dev, from our definitions."""
    return _of_definitions(crds())


@cache
def neighbour_definitions() -> tuple[Json, ...]:
    """Of projects beside Kubernetes that we exchange objects with."""
    return tuple(yaml.safe_load(path.read_text()) for path in sorted(NEIGHBOURS.glob("*.yaml")))


@cache
def neighbour_schemas() -> Mapping[Kind, Json]:
    """Of these projects, from their definitions."""
    return _of_definitions(neighbour_definitions())


def _of_definitions(found: Iterable[Json]) -> Mapping[Kind, Json]:
    return {
        (f"{one['spec']['group']}/{version['name']}", one["spec"]["names"]["kind"]): closed(
            version["schema"]["openAPIV3Schema"]
        )
        for one in found
        for version in one["spec"]["versions"]
    }


def closed(structural: Json) -> Json:
    """A structural schema as JSON Schema in which unknown fields are errors, as in strict field validation.

    Rules in CEL and formats are left to the API server.
    """
    schema = {key: value for key, value in structural.items() if not key.startswith("x-") and key != "format"}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True:
            schema[exclusive] = schema.pop(bound)
        elif schema.get(exclusive) is False:
            del schema[exclusive]
    if structural.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if "properties" in schema:
        schema["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        if not structural.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = closed(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        schema["items"] = closed(schema["items"])
    return schema
