"""Frozen values with tensors in them, taken apart and put together again around other tensors.

What crosses to a device is a step's view: dataclasses and tuples with tensors at the leaves. All of them are copied at
once, in one piece of memory, so somebody has to know where they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

_FIELDS: dict[type, tuple[str, ...]] = {}
"""Of the types seen so far."""


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor in dataclasses and tuples of `value`, in a fixed order. Any other object is a leaf without one."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def with_tensors(value: T, tensors: Sequence[Tensor]) -> T:
    """`value` with other tensors in the places that `tensors_of` finds, in its order."""
    rest = iter(tensors)
    rebuilt: T = _rebuild(value, rest)
    assert next(rest, None) is None, "more tensors than places"
    return rebuilt


def _collect(value: object, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found)
    else:
        for name in _names(type(value)):
            _collect(getattr(value, name), found)


def _rebuild(value: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(rest)
    if isinstance(value, tuple):
        items = [_rebuild(item, rest) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    names = _names(type(value))
    return type(value)(**{name: _rebuild(getattr(value, name), rest) for name in names}) if names else value


def _names(kind: type) -> tuple[str, ...]:
    """Fields of a frozen dataclass; () for any other type, whose values nobody may copy."""
    known = _FIELDS.get(kind)
    if known is None:
        frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        known = _FIELDS[kind] = tuple(each.name for each in fields(kind) if each.init) if frozen else ()
    return known
