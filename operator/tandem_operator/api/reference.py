"""The reference page of the custom resources, from their schemas. `python -m tandem_operator.api.reference` prints it.

docs/custom-resources.md holds the printed form; a test keeps it equal to this.
"""

import sys
from collections.abc import Iterator
from typing import Any

from tandem_operator.api.crds import Schema, crds

HEAD = """\
# Custom resources

Every field of `tandem.dev/v1beta1`, as `kubectl explain` has it. This page is made from the schema
(`python -m tandem_operator.api.reference > docs/custom-resources.md`). Examples: [examples/](../examples/).
"""


def reference() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(_resource(crd) for crd in crds())


def _resource(crd: dict[str, Any]) -> str:
    names = crd["spec"]["names"]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [f"\n## {names['kind']}\n\n{schema['description']} Short name: `{names['shortNames'][0]}`.\n"]
    for name in ("spec", "status"):
        parts.append(f"\n### {names['kind']} {name}\n\n| field | type | default | what it is |\n|---|---|---|---|\n")
        parts += [_row(path, one) for path, one in _fields(schema["properties"][name], name)]
        parts += _rules(schema["properties"][name], name)
    return "".join(parts)


def _fields(part: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    for name, one in part.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, one
        if one.get("type") == "array":
            yield from _fields(one["items"], f"{here}[]")
        else:
            yield from _fields(one, here)


def _row(path: str, one: Schema) -> str:
    default = one.get("default")
    shown = f"`{_value(default)}`" if default not in (None, {}) else ""
    return f"| `{path}` | {_type(one)} | {shown} | {_cell(one.get('description', ''))} |\n"


def _type(one: Schema) -> str:
    if "enum" in one:
        return " ".join(f"`{value}`" for value in one["enum"])
    if "x-kubernetes-int-or-string" in one:
        return "quantity"
    kind: str = one.get("type", "")
    if kind == "array":
        return f"list of {_type(one['items'])}"
    if kind == "object" and "additionalProperties" in one:
        return f"map of {_type(one['additionalProperties'])}"
    bounds = [f"{sign} {one[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in one]
    if one.get("exclusiveMinimum"):
        bounds[0] = bounds[0].replace("≥", ">")
    return " ".join([kind, *bounds])


def _rules(part: Schema, path: str) -> Iterator[str]:
    """What the API server refuses beyond types and bounds."""
    found = list(_every_rule(part, path))
    if found:
        yield "\nRefused as well:\n\n"
        yield from (f"- `{where}`: {message}\n" for where, message in found)


def _every_rule(part: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in part.get("x-kubernetes-validations", ()):
        yield path, rule["message"]
    for name, one in part.get("properties", {}).items():
        below = one["items"] if one.get("type") == "array" else one
        yield from _every_rule(below, f"{path}.{name}")


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
