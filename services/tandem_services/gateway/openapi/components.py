"""JSON schemas of what the gateway decodes and encodes, made by msgspec from the structs themselves.

Requests and answers are apart: a field with a default may be left out of a request, while an answer always has it. A
struct of both gets a second name for its answers where that makes a difference.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tandem_services.gateway.openapi.narrowing import narrowed

Schema = dict[str, Any]

PLACE = "#/components/schemas/"


class Components:
    """`schemas` is the document's part; `request` and `answer` refer to it."""

    def __init__(self, requests: Iterable[type[msgspec.Struct]], answers: Iterable[Any], *, strict: bool) -> None:
        self._requests = _by_type(requests)
        self._answers = _by_type(answers)
        structs = {struct.__name__: struct for struct in _structs(self._answers)}
        of_requests = _schemas(self._requests)
        of_answers = {name: _answered(schema, structs.get(name)) for name, schema in _schemas(self._answers).items()}
        both = {name for name in of_requests.keys() & of_answers.keys() if of_requests[name] != of_answers[name]}
        self._renamed = {PLACE + name: f"{PLACE}{name}Output" for name in both}
        for shape in self._requests:
            of_requests[shape.__name__] = narrowed(shape, of_requests[shape.__name__], strict=strict)
        self.schemas: dict[str, Schema] = dict(of_requests)
        for name, schema in of_answers.items():
            self.schemas[f"{name}Output" if name in both else name] = self._output(schema)

    def request(self, shape: type[msgspec.Struct]) -> Schema:
        return self._requests[shape]

    def answer(self, shape: Any) -> Schema:
        schema: Schema = self._output(self._answers[shape])
        return schema

    def _output(self, schema: Any) -> Any:
        """With the names that structs have in answers."""
        match schema:
            case dict():
                return {key: self._output(value) for key, value in schema.items()}
            case list():
                return [self._output(value) for value in schema]
            case str():
                return self._renamed.get(schema, schema)
        return schema


def _by_type(types: Iterable[Any]) -> dict[Any, Schema]:
    wanted = list(dict.fromkeys(types))
    return dict(zip(wanted, msgspec.json.schema_components(wanted, ref_template=PLACE + "{name}")[0], strict=True))


def _schemas(types: Mapping[Any, Schema]) -> dict[str, Schema]:
    return msgspec.json.schema_components(types, ref_template=PLACE + "{name}")[1]


def _answered(schema: Schema, struct: type[msgspec.Struct] | None) -> Schema:
    """As it is written: with every field but those that may be unset."""
    if "properties" not in schema:
        return schema
    properties = {name: _without_default(value) for name, value in schema["properties"].items()}
    required = schema["required"] if struct is None else [*_always_written(struct)]
    return {**schema, "properties": properties, "required": required}


def _without_default(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "default"}


def _always_written(struct: type[msgspec.Struct]) -> Iterator[str]:
    config = struct.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field
    for field in msgspec.structs.fields(struct):
        may_be_left_out = field.default is msgspec.UNSET or (config.omit_defaults and not field.required)
        if not may_be_left_out:
            yield field.encode_name


def _structs(types: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """All structs that these types are made of."""
    found: set[type[msgspec.Struct]] = set()
    waiting = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
        waiting += _parts(info)
    return found


def _parts(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    match info:
        case msgspec.inspect.StructType() | msgspec.inspect.DataclassType():
            yield from (field.type for field in info.fields)
        case msgspec.inspect.UnionType():
            yield from info.types
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield info.item_type
        case msgspec.inspect.DictType():
            yield info.value_type
