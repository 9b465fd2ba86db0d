"""Walks through the schema of a custom resource: its fields, rules, constraints and defaults, by their paths.

A path is written as the API server writes it: `.spec.aliases[0]`, `.spec.transfer.ucx`.
"""

import copy
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def schema_of_crd(crd: dict[str, Any]) -> Schema:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields_below(part: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Named fields, through lists and maps."""
    for name, one in part.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, one
        yield from fields_below(one, here)
    items = part.get("items")
    if items:
        yield from fields_below(items, f"{path}[0]")


def parts_below(part: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema: fields, entries of lists, and `part` itself."""
    yield path, part
    for name, one in part.get("properties", {}).items():
        yield from parts_below(one, f"{path}.{name}")
    if part.get("items"):
        yield from parts_below(part["items"], f"{path}[0]")


def rules_below(part: Schema) -> Iterator[tuple[str, str]]:
    """Path and message of each CEL rule."""
    for path, one in parts_below(part):
        for rule in one.get("x-kubernetes-validations", ()):
            yield path, rule["message"]


def defaults_below(part: Schema) -> dict[str, Any]:
    """What the API server makes of an empty object."""
    filled = {}
    for name, one in part.get("properties", {}).items():
        if "default" in one:
            value = copy.deepcopy(one["default"])
            filled[name] = {**defaults_below(one), **value} if isinstance(value, dict) else value
    return filled


def at_path(path: str, value: Any) -> Any:
    """`value` within the objects and lists that lead to it: the inverse of looking it up."""
    for word in reversed(path.split(".")[1:]):
        name, bracket, _ = word.partition("[")
        value = {name: [value] if bracket else value}
    return value


def merged(base: Any, change: Any) -> Any:
    """`change` over `base`; entries of a list one by one."""
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{name: merged(base.get(name), value) for name, value in change.items()}}
    if isinstance(base, list) and isinstance(change, list) and base:
        return [merged(base[0], change[0]), *base[1:]] if change else change
    return change
