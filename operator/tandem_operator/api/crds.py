"""The CustomResourceDefinitions, as they are applied. `python -m tandem_operator.api.crds` prints them.

charts/tandem/crds/ holds the printed form; a test keeps it equal to this.
"""

import sys
from typing import Any

import yaml

from tandem_operator.api.model_service import GROUP, VERSION, ModelService
from tandem_operator.api.schema import Schema, schema_of
from tandem_operator.api.worker_pool import WorkerPool

Manifest = dict[str, Any]

SERVICE_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Workers", "string", ".status.ready", 0),
    ("Serving", "string", ".status.serving", 0),
    ("Wanted", "string", ".status.revision", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Trouble", "string", ".status.trouble", 0),
    ("Endpoint", "string", ".status.endpoint", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
POOL_COLUMNS = (
    ("Service", "string", ".spec.serviceName", 0),
    ("Role", "string", ".spec.role", 0),
    ("Wanted", "integer", ".spec.replicas", 0),
    ("Ready", "integer", ".status.readyReplicas", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def crds() -> tuple[Manifest, Manifest]:
    """Of ModelService and WorkerPool."""
    service = _crd(
        schema_of(ModelService), "ModelService", "modelservices", ("ms",), SERVICE_COLUMNS, subresources={"status": {}}
    )
    pool = _crd(
        schema_of(WorkerPool),
        "WorkerPool",
        "workerpools",
        ("wp",),
        POOL_COLUMNS,
        subresources={"status": {}, "scale": SCALE},
    )
    return service, pool


def _crd(
    schema: Schema,
    kind: str,
    plural: str,
    short_names: tuple[str, ...],
    columns: tuple[tuple[str, str, str, int], ...],
    *,
    subresources: Manifest,
) -> Manifest:
    schema["properties"].update(apiVersion={"type": "string"}, kind={"type": "string"}, metadata={"type": "object"})
    # A default status would be written before the operator has seen the object.
    schema["properties"]["status"].pop("default", None)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": list(short_names),
                "categories": ["all", "tandem"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(*column) for column in columns],
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, priority: int) -> Manifest:
    column: Manifest = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: an alias in a manifest surprises people and some tools."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


def to_yaml(manifests: tuple[Manifest, ...]) -> str:
    """Documents as people apply them."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)


if __name__ == "__main__":
    sys.stdout.write(to_yaml(crds()))
