"""The CustomResourceDefinitions, as they are applied. `python -m tandem_operator.api.crds` prints them.

charts/tandem/crds/ holds the printed form; a test keeps it equal to this.

Structural OpenAPI schemas of the custom resources, from the classes that decode them.

    class + its field docstrings + Meta + RULES  →  schema of one version of a CRD

One source for what the API server refuses, what `kubectl explain` says and what the operator reads: they cannot differ.
"""

import ast
import inspect
import sys
import textwrap
from functools import cache, singledispatch
from typing import Any

import msgspec
import yaml
from msgspec import inspect as types

from tandem_operator.api.model_adapter import ModelAdapter
from tandem_operator.api.model_cache import ModelCache
from tandem_operator.api.model_gateway import ModelGateway
from tandem_operator.api.model_service import FORMER_VERSIONS, GROUP, VERSION, ModelService
from tandem_operator.api.types import rules_of
from tandem_operator.api.worker_pool import WorkerPool

Schema = dict[str, Any]
_SCALARS = {types.BoolType: "boolean", types.IntType: "integer", types.FloatType: "number", types.StrType: "string"}

_LIMITS: dict[type, dict[str, str]] = {
    types.IntType: {"ge": "minimum", "le": "maximum"},
    types.FloatType: {"ge": "minimum", "le": "maximum", "gt": "minimum", "lt": "maximum"},
    types.StrType: {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
    types.ListType: {"min_length": "minItems", "max_length": "maxItems"},
    types.DictType: {"min_length": "minProperties", "max_length": "maxProperties"},
}
_EXCLUSIVE = {"gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def schema_of(part: type) -> Schema:
    """Schema of an `Api` class. Raises `TypeError` for a type that a structural schema cannot say."""
    struct = types.type_info(part)
    assert isinstance(struct, types.StructType), f"{part.__name__} is no part of the API"
    return _struct(struct)


def _field(item: types.Field) -> Schema:
    schema = _type(item.type)
    default = _default(item)
    if default is not None:
        schema["default"] = default
    return schema


def _default(item: types.Field) -> Any:
    """The API server's value where the field is absent. None: nothing, which is not the same as an empty value."""
    value = item.default
    if item.default_factory is not msgspec.NODEFAULT:
        value = item.default_factory()
    if value is msgspec.NODEFAULT or value in (None, "", [], {}):
        return None
    if isinstance(value, msgspec.Struct):
        # Fields have their own defaults; an empty object makes the API server fill them in, or is left out.
        built = msgspec.to_builtins(value)
        return built or ({} if _has_defaults(type(value)) else None)
    return value


def _has_defaults(part: type) -> bool:
    struct = types.type_info(part)
    assert isinstance(struct, types.StructType)
    return any(_default(item) is not None for item in struct.fields)


@singledispatch
def _type(kind: types.Type) -> Schema:
    """Schema of a value of this type."""
    if type(kind) not in _SCALARS:
        raise TypeError(f"{kind} cannot be expressed in a structural schema")
    return {"type": _SCALARS[type(kind)], **_limits(kind)}


@_type.register
def _(kind: types.IntType) -> Schema:
    return {"type": "integer", "format": "int64", **_limits(kind)}


@_type.register
def _(kind: types.LiteralType) -> Schema:
    return {"type": "string", "enum": list(kind.values)}


@_type.register
def _(kind: types.ListType) -> Schema:
    return {"type": "array", "items": _type(kind.item_type), **_limits(kind)}


@_type.register
def _(kind: types.DictType) -> Schema:
    if isinstance(kind.value_type, types.AnyType):
        return {"type": "object"}
    return {"type": "object", "additionalProperties": _type(kind.value_type), **_limits(kind)}


@_type.register
def _(kind: types.Metadata) -> Schema:
    extra = dict(kind.extra_json_schema or {})
    if "x-kubernetes-int-or-string" in extra:
        # Structural schemas have this instead of a type.
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], **extra}
    return {**_type(kind.type), **extra}


@_type.register
def _(kind: types.UnionType) -> Schema:
    """Only "this or nothing": what is None is left out, so the schema is that of the rest."""
    rest = [one for one in kind.types if not isinstance(one, types.NoneType)]
    if len(rest) != 1:
        raise TypeError(f"a union of {rest} cannot be expressed in a structural schema")
    return _type(rest[0])


@_type.register
def _struct(struct: types.StructType) -> Schema:
    texts = docstrings_of(struct.cls)
    schema: Schema = {"type": "object"}
    if struct.cls.__doc__:
        schema["description"] = _one_line(struct.cls.__doc__)
    properties: Schema = {}
    for item in struct.fields:
        one = _field(item)
        text = texts.get(item.name)
        if text is not None:
            one = {"description": text, **{key: value for key, value in one.items() if key != "description"}}
        properties[item.encode_name] = one
    schema["properties"] = properties
    required = [item.encode_name for item in struct.fields if item.required]
    if required:
        schema["required"] = required
    rules = rules_of(struct.cls)
    if rules:
        schema["x-kubernetes-validations"] = [{"rule": rule.expression, "message": rule.message} for rule in rules]
    return schema


def _limits(kind: types.Type) -> Schema:
    schema: Schema = {}
    for name, keyword in _LIMITS.get(type(kind), {}).items():
        value = getattr(kind, name)
        if value is not None:
            # Equal annotations are one object to typing, so a class elsewhere may have written 0 for this 0.0.
            schema[keyword] = float(value) if isinstance(kind, types.FloatType) else value
            if name in _EXCLUSIVE:
                schema[_EXCLUSIVE[name]] = True
    return schema


@cache
def docstrings_of(part: type) -> dict[str, str]:
    """The string below each field, as one line, of `part` and of what it extends."""
    texts: dict[str, str] = {}
    for base in reversed(part.__mro__[:-1]):
        if base.__module__.startswith("msgspec"):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(text):
                texts[field.target.id] = _one_line(ast.literal_eval(text.value))  # type: ignore[attr-defined]
    return texts


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _one_line(text: str) -> str:
    return " ".join(text.split())


Manifest = dict[str, Any]

SERVICE_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Workers", "string", ".status.ready", 0),
    ("Serving", "string", ".status.serving", 0),
    ("Wanted", "string", ".status.revision", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Error", "string", ".status.error", 0),
    ("SLO", "string", ".status.slo.summary", 1),
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

GATEWAY_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Gateways", "string", ".status.ready", 0),
    ("Served", "integer", ".status.served", 0),
    ("Refused", "integer", ".status.refused", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Error", "string", ".status.error", 0),
    ("Endpoint", "string", ".status.endpoint", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)

ADAPTER_COLUMNS = (
    ("Service", "string", ".spec.serviceName", 0),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Loaded", "integer", ".status.loaded", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Digest", "string", ".status.digest", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)

CACHE_COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Progress", "string", ".status.progress", 0),
    ("Size", "string", ".status.size", 0),
    ("Error", "string", ".status.error", 0),
    ("Model", "string", ".spec.source.huggingFace.id", 1),
    ("Commit", "string", ".status.commit", 1),
    ("Claim", "string", ".status.claimName", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)

SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def crds() -> tuple[Manifest, ...]:
    """Of ModelService, WorkerPool, ModelGateway, ModelAdapter and ModelCache."""
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
    gateway = _crd(
        schema_of(ModelGateway), "ModelGateway", "modelgateways", ("mg",), GATEWAY_COLUMNS, subresources={"status": {}}
    )
    adapter = _crd(
        schema_of(ModelAdapter),
        "ModelAdapter",
        "modeladapters",
        ("madapter",),
        ADAPTER_COLUMNS,
        subresources={"status": {}},
    )
    weights = _crd(
        schema_of(ModelCache), "ModelCache", "modelcaches", ("mc",), CACHE_COLUMNS, subresources={"status": {}}
    )
    return service, pool, gateway, adapter, weights


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
            "conversion": {"strategy": "None"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == VERSION,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(*column) for column in columns],
                }
                for version in (VERSION, *FORMER_VERSIONS)
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
