"""What identifies compiled code: the function, its arguments or types, and all that compiled it.

spec       a builder with arguments, or a function with the types of its parameters
key        the spec, the target, the versions of Python, numba and llvmlite, and a digest of all sources involved
file name  the function's name and a digest of the key
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import msgspec

from tandem_engine.kernels.store.code_file import SUFFIX

NAME_DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel, independent of what it is compiled for."""

    function: str
    """`module:name` of a builder, or of a function for Python code."""
    arguments: tuple[tuple[str, Any], ...] | None = None
    """Of a builder, by name and sorted: numbers, truth values and dtypes as text."""
    types: tuple[Any, ...] | None = None
    """Of a function's parameters, as `kernels.cpu.kept` writes types."""

    @cached_property
    def text(self) -> str:
        """JSON, the same for equal specs."""
        fields: dict[str, Any] = {"function": self.function}
        if self.arguments is not None:
            fields["arguments"] = dict(self.arguments)
        if self.types is not None:
            fields["types"] = self.types
        return msgspec.json.encode(fields, order="sorted").decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `text`."""
        fields = msgspec.json.decode(text)
        arguments, types = fields.get("arguments"), fields.get("types")
        return cls(
            function=fields["function"],
            arguments=None if arguments is None else tuple(sorted(arguments.items())),
            types=None if types is None else _frozen(types),
        )

    @property
    def name(self) -> str:
        """For people: the function and its arguments."""
        function = self.function.rpartition(":")[2]
        if self.arguments is not None:
            return f"{function}({', '.join(f'{name}={value}' for name, value in self.arguments)})"
        return f"{function}({', '.join(map(_short, self.types or ()))})"


def _short(kind: Any) -> str:
    """A type, for people."""
    if not isinstance(kind, tuple):
        return str(kind)
    name, *parts = kind
    return f"{parts[0]}[{parts[1]}d]" if name == "array" else f"({', '.join(map(_short, parts))})"


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class KernelKey:
    """One kernel, compiled for one target by one compiler."""

    spec: KernelSpec
    target: str
    """Its name; of code for one CPU alone also the CPU."""
    compiler: tuple[str, ...]
    """Versions, and the digest of all sources."""

    @cached_property
    def text(self) -> str:
        return msgspec.json.encode([self.spec.text, self.target, *self.compiler]).decode()

    @cached_property
    def file_name(self) -> str:
        function = self.spec.function.rpartition(":")[2]
        return f"{function}-{hashlib.sha256(self.text.encode()).hexdigest()[:NAME_DIGITS]}{SUFFIX}"
