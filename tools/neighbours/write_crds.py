"""Write crds/*.yaml: definitions of the kinds of neighbours that Tandem uses, from the packages of `SOURCES`.

    python tools/neighbours/write_crds.py [FOLDER]     needs npm; FOLDER instead of tools/neighbours/crds

    package on npm  →  its types, which come from the project's Go types  →  JSON Schema  →  definition

Fields, types, required fields and allowed values are the project's own. Patterns, bounds and rules in CEL are not in
types and therefore not checked. Definitions without the annotation `tandem.dev/package` are written by hand, and stay.

Packages are unpacked in $TANDEM_NEIGHBOURS_HOME (~/.cache/tandem-neighbours); a second run asks no registry.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("TANDEM_NEIGHBOURS_HOME", "~/.cache/tandem-neighbours")).expanduser()
GENERATOR = "ts-json-schema-generator@2.4.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One kind, and the package that has its types."""

    package: str
    version: str
    published: str
    """Day of the package's release: it does not name the project's."""
    group: str
    api_version: str
    kind: str
    plural: str

    @property
    def module(self) -> Path:
        """The file with the types of the kind's spec, below node_modules."""
        return Path(self.package) / self.group / self.api_version / f"{self.kind}Spec.d.ts"


_GATEWAY: Json = {"package": "@kubernetes-models/gateway-api", "version": "2.0.0", "published": "2026-08-20"}
_PROMETHEUS: Json = {"package": "@kubernetes-models/prometheus-operator", "version": "6.0.0", "published": "2026-08-10"}
_KEDA: Json = {"package": "@kubernetes-models/keda", "version": "2.0.0", "published": "2026-09-08"}

SOURCES = (
    Source(**_GATEWAY, group="gateway.networking.k8s.io", api_version="v1", kind="HTTPRoute", plural="httproutes"),
    Source(**_GATEWAY, group="gateway.networking.k8s.io", api_version="v1", kind="Gateway", plural="gateways"),
    Source(**_PROMETHEUS, group="monitoring.coreos.com", api_version="v1", kind="PodMonitor", plural="podmonitors"),
    Source(
        **_PROMETHEUS, group="monitoring.coreos.com", api_version="v1", kind="ServiceMonitor", plural="servicemonitors"
    ),
    Source(**_KEDA, group="keda.sh", api_version="v1alpha1", kind="ScaledObject", plural="scaledobjects"),
)


def install() -> Path:
    """Packages and the generator; gives the folder of node_modules."""
    wanted = [GENERATOR, *sorted({f"{one.package}@{one.version}" for one in SOURCES})]
    stamp = HOME / "npm" / "wanted"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        (stamp.parent / "package.json").write_text("{}")
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", *wanted]
        subprocess.run(command, cwd=stamp.parent, check=True, stdout=subprocess.DEVNULL)
        stamp.write_text("\n".join(wanted))
    return stamp.parent / "node_modules"


def definition(source: Source, modules: Path) -> Json:
    """The CustomResourceDefinition of a kind."""
    command = [str(modules / ".bin" / "ts-json-schema-generator"), "--no-type-check"]
    command += ["--path", str(modules / source.module), "--type", f"I{source.kind}Spec"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    document = json.loads(printed)
    spec = structural(document, document["definitions"], ())
    open_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
        "status": open_object,
    }
    schema = {"type": "object", "required": ["spec"], "properties": properties}
    annotations = {"tandem.dev/package": f"npm {source.package} {source.version}, published {source.published}"}
    if source.group.endswith("k8s.io"):
        annotations["api-approved.kubernetes.io"] = "unapproved, for tests"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{source.plural}.{source.group}", "annotations": annotations},
        "spec": {
            "group": source.group,
            "scope": "Namespaced",
            "names": {
                "kind": source.kind,
                "listKind": f"{source.kind}List",
                "plural": source.plural,
                "singular": source.kind.lower(),
            },
            "versions": [
                {
                    "name": source.api_version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def structural(schema: Json, definitions: Mapping[str, Json], path: tuple[str, ...]) -> Json:
    """A JSON Schema with references as a structural one without. Raises `ValueError` for what it cannot express."""
    reference = schema.get("$ref")
    if reference is not None:
        name = reference.removeprefix("#/definitions/").replace("%3C", "<").replace("%3E", ">")
        if name in path:
            raise ValueError(f"{name} contains itself")
        return structural(definitions[name], definitions, (*path, name))
    if "anyOf" in schema:
        parts = [structural(one, definitions, path) for one in schema["anyOf"]]
        if sorted(str(one.get("type")) for one in parts) == ["integer", "string"]:
            return {"x-kubernetes-int-or-string": True}
        raise ValueError(f"a union of {parts}")
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = sorted(set(kind) - {"null"})
        if kinds in (["integer", "string"], ["number", "string"]):
            return {"x-kubernetes-int-or-string": True}
        [kind] = kinds
    if kind is None:
        return {"x-kubernetes-preserve-unknown-fields": True}
    found: Json = {"type": kind}
    for key in ("enum", "required"):
        if key in schema:
            found[key] = schema[key]
    if "const" in schema:
        found["enum"] = [schema["const"]]
    if schema.get("properties"):
        found["properties"] = {
            name: structural(one, definitions, path) for name, one in sorted(schema["properties"].items())
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = structural(schema["additionalProperties"], definitions, path)
    elif kind == "object":
        found["x-kubernetes-preserve-unknown-fields"] = True
    if kind == "array":
        found["items"] = structural(schema["items"], definitions, path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "crds")
    folder = parser.parse_args().folder
    modules = install()
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        target = folder / f"{source.plural}.yaml"
        text = yaml.safe_dump(definition(source, modules), sort_keys=False, default_flow_style=None, width=128)
        target.write_text(f"# Written by tools/neighbours/write_crds.py; do not edit.\n{text}", "utf-8")
        print(target)


if __name__ == "__main__":
    main()
