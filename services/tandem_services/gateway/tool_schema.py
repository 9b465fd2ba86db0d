"""JSON schemas of tools: what is wrong with one on its face, and grammars made of several.

What a schema means, and what it costs, the engine finds out when a grammar needs it. Here a mistake is refused that
would otherwise only confuse the model.
"""

from collections.abc import Collection, Mapping
from typing import Any

from tandem_engine.errors import InvalidRequestError
from tandem_engine.logs import quoted
from tandem_engine.messages.grammar import check_depth
from tandem_services.common.errors import bad_request

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def check_parameters(schema: Mapping[str, Any], param: str) -> None:
    """Raise `ApiError` 400 naming the place of the first mistake in the schema of a tool's arguments."""
    try:
        check_depth(schema)
    except InvalidRequestError as error:
        raise bad_request(f"{param} is nested too deeply: {error}", param) from error
    if schema and schema.get("type", "object") != "object":
        raise bad_request(f"{param}.type must be object, got {quoted(schema['type'])}", f"{param}.type")
    _check(schema, param)


def _check(schema: Any, param: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise bad_request(f"{param} must be a JSON schema, an object, got {quoted(schema)}", param)
    _check_type(schema.get("type"), f"{param}.type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{param}.required must be a list of strings", f"{param}.required")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise bad_request(f"{param}.enum must be a list that is not empty", f"{param}.enum")
    for keyword in _OF_SCHEMAS:
        named = schema.get(keyword, {})
        if not isinstance(named, dict):
            raise bad_request(f"{param}.{keyword} must be an object of schemas", f"{param}.{keyword}")
        for name, inner in named.items():
            _check(inner, f"{param}.{keyword}.{quoted(name)}")
    for keyword in _LISTS:
        several = schema.get(keyword, [])
        if not isinstance(several, list):
            raise bad_request(f"{param}.{keyword} must be a list of schemas", f"{param}.{keyword}")
        for position, inner in enumerate(several):
            _check(inner, f"{param}.{keyword}[{position}]")
    for keyword in _SINGLE:
        if keyword in schema:
            _check(schema[keyword], f"{param}.{keyword}")


def _check_type(kind: Any, param: str) -> None:
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    for name in kinds:
        if not isinstance(name, str) or name not in _TYPES:
            raise bad_request(f"{param} must be one of {', '.join(sorted(_TYPES))}, got {quoted(name)}", param)


def call_array_schema(schemas: Mapping[str, Mapping[str, Any]], *, most: int | None) -> dict[str, Any]:
    """Schema of one or more calls of these tools, at most `most`."""
    calls = [_call_schema(name) for name in schemas]
    array = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    definitions = {name: _moved(as_object(schema), f"#/$defs/{name}") for name, schema in schemas.items()}
    return {**array, **({} if most is None else {"maxItems": most}), "$defs": definitions}


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """`schema` with its references to itself made right for where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


def as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, whether or not their schema says so."""
    return schema if "type" in schema else {"type": "object", **schema}


def tag_document(
    schemas: Mapping[str, Mapping[str, Any]], tag: tuple[str, str, str], *, strict: Collection[str]
) -> dict[str, Any]:
    """Structural tags: free text, and calls in the form of `tag`. Tools that are not strict take any object."""
    trigger, begin, end = tag
    structures = [
        {
            "begin": begin.format(name=name),
            "schema": as_object(schema) if name in strict else {"type": "object"},
            "end": end,
        }
        for name, schema in schemas.items()
    ]
    return {"triggers": [trigger], "structures": structures}
