"""A sample of every struct that processes send to each other or leave in Redis, and files of those of each release.

    python -m tandem_testing.wire_samples     writes the file of this release

The file of an earlier release never changes: it is what processes of that release send, and later releases must read it
for as long as the release is in their window. `tests/unit/engine/messages/test_releases.py` reads all files.
"""

import enum
import json
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

import tandem_engine.messages
import tandem_services.router
from tandem_engine.base.release import RELEASE

FOLDER = Path(__file__).parents[2] / "unit" / "engine" / "messages" / "wire"
DIGEST = "0123456789abcdef" * 2


OF_ONE_PROCESS = frozenset(
    {
        "Candidate",
        "Figures",
        "Latency",
        "Option",
        "PricedFetch",
        "PricedOption",
        "PricedOptions",
        "PricedPrefix",
        "ScoreTerm",
    }
)
"""Of the router, those that never leave a process. Nor do private ones, which read replies of its Redis functions."""


@cache
def structs() -> dict[str, type[msgspec.Struct]]:
    """All structs of messages and of values in Redis, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for package in (tandem_engine.messages, tandem_services.router):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(import_module(module.name)).items():
                if not isinstance(value, type) or not issubclass(value, msgspec.Struct):
                    continue
                if value.__module__ == module.name and not name.startswith("_") and name not in OF_ONE_PROCESS:
                    assert name not in found, f"two structs are called {name}"
                    found[name] = value
    return found


def sample(struct: type[msgspec.Struct]) -> msgspec.Struct:
    """One in which each field has a value, which is not the default."""
    built = _value(inspect.type_info(struct))
    assert isinstance(built, msgspec.Struct)
    return built


def _value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: field.default is not True and _value(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return _value(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.BoolType():
            return True
        case inspect.IntType(ge=least, le=most):
            return min(max(7, least or 0), 7 if most is None else most)
        case inspect.FloatType():
            return 0.375
        case inspect.StrType(pattern=pattern):
            return DIGEST if pattern else "text"
        case inspect.BytesType():
            return b"\x00\x01\xfe"
        case inspect.EnumType(cls=cls):
            return _last(cls)
        case inspect.VarTupleType(item_type=item):
            return (_value(item),)
        case inspect.TupleType(item_types=items):
            return tuple(map(_value, items))
        case inspect.DictType(key_type=key, value_type=value):
            return {_value(key): _value(value)}
    raise NotImplementedError(f"wire_samples has no value of {kind}: add a case")


def _last(members: type[enum.Enum]) -> enum.Enum:
    return list(members)[-1]


def files() -> Iterator[tuple[int, dict[str, bytes]]]:
    """Each release that has a file, and its samples."""
    for path in sorted(FOLDER.glob("*.json"), key=lambda path: int(path.stem)):
        yield int(path.stem), {name: bytes.fromhex(text) for name, text in json.loads(path.read_text("utf-8")).items()}


def encoded_samples() -> dict[str, bytes]:
    """Of this release."""
    return {name: msgspec.msgpack.encode(sample(struct)) for name, struct in sorted(structs().items())}


def write() -> Path:
    """The file of this release."""
    path = FOLDER / f"{RELEASE}.json"
    path.write_text(
        json.dumps({name: data.hex() for name, data in encoded_samples().items()}, indent=1) + "\n", "utf-8"
    )
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write()}\n")
