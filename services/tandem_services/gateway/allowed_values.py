"""What a field of a request may say, where that is one of a few words: for the sentence that refuses another."""

import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

from msgspec import Struct, inspect

_STEP = re.compile(r"\w+|\[[^]]*\]")


@cache
def _type_of(shape: type[Struct]) -> inspect.Type:
    return inspect.type_info(shape)


def allowed_values(shape: type[Struct], path: str) -> tuple[str | int, ...]:
    """Of the field at `path`, as msgspec writes it (`messages[0].role`); empty where it may say anything."""
    types = [*_alternatives(_type_of(shape))]
    for step in _STEP.findall(path):
        types = [inner for each in types for inner in _within(each, step)]
    return tuple(dict.fromkeys(value for each in types for value in _values(each)))


def _alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    match type_:
        case inspect.UnionType(types=types):
            for each in types:
                yield from _alternatives(each)
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case _:
            yield type_


def _within(type_: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of a named field, or of the items of an array or object."""
    inner: list[inspect.Type] = []
    match type_:
        case inspect.StructType(fields=fields) if not step.startswith("["):
            inner = [field.type for field in fields if field.encode_name == step]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) if step.startswith("["):
            inner = [item]
        case inspect.DictType(value_type=value) if step.startswith("["):
            inner = [value]
    for each in inner:
        yield from _alternatives(each)


def _values(type_: inspect.Type) -> Iterator[Any]:
    match type_:
        case inspect.LiteralType(values=values):
            yield from values
        case inspect.EnumType(cls=cls) if issubclass(cls, Enum):
            yield from (member.value for member in cls)
