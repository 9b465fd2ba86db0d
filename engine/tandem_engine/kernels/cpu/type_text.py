"""numba's types as text and tuples, for the keys of compiled code and for its files.

int64                          "int64"
a dense array of float32       ("array", "float32", 2, "C")
a tuple of both                ("tuple", ("array", "float32", 2, "C"), "int64")
nothing                        None
"""

from typing import Any

from numba import types

_SCALARS = {
    str(kind): kind
    for kind in (types.boolean, types.int32, types.int64, types.uint32, types.uint64, types.float32, types.float64)
}
_NUMBERS = _SCALARS | {str(kind): kind for kind in (types.int8, types.int16, types.uint8, types.uint16)}


class CannotKeepError(Exception):
    """Code uses something that a file of a kernel has no place for."""


def written(kind: Any) -> Any:
    """A type as text and tuples. Raises `CannotKeepError` for kinds that kernels have no use for."""
    if kind == types.none:
        return None
    if str(kind) in _NUMBERS and _NUMBERS[str(kind)] == kind:
        return str(kind)
    if isinstance(kind, types.Array) and type(kind) is types.Array and kind.aligned:
        access = () if kind.mutable else ("readonly",)
        return ("array", written(kind.dtype), kind.ndim, kind.layout, *access)
    if isinstance(kind, types.BaseTuple) and not isinstance(kind, types.BaseNamedTuple):
        return ("tuple", *(written(each) for each in kind))
    raise CannotKeepError(f"it takes or returns {kind}")


def array(number: str, dimensions: int) -> tuple[str, str, int, str]:
    """A dense array, as `written`."""
    return "array", number, dimensions, "C"


def type_of(text: Any) -> Any:
    """The inverse of `written`."""
    if text is None:
        return types.none
    if isinstance(text, str):
        return _NUMBERS[text]
    kind, *rest = text
    if kind == "tuple":
        return types.BaseTuple.from_types(tuple(type_of(each) for each in rest))
    assert kind == "array", f"{kind} is no type"
    number, dimensions, layout, *access = rest
    return types.Array(type_of(number), dimensions, layout, readonly=bool(access))
