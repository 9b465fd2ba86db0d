"""Typed, bounded reads from a config object. Every error names the file, the field and its value."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tandem_engine.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.model.json_file import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFields:
    """One JSON object of a config file. Null means the same as absent, but for the `optional_` reads."""

    path: Path
    values: dict[str, object]
    prefix: str = ""
    """Where the object stands in the file, such as `rope_parameters.`."""

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, *, least: int, most: int, default: int | None = None) -> int:
        """An integer in [least, most]; without a default the field is required."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, f"must be an integer from {least} to {most}")
        return value

    def number(self, name: str, *, least: float, most: float, default: float | None = None) -> float:
        """A number in [least, most]; without a default the field is required."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "must be a number")
        if not least <= value <= most:
            self.refuse(name, f"must be from {least:g} to {most:g}")
        return float(value)

    def optional_integer(self, name: str, *, least: int, most: int, default: int | None) -> int | None:
        """As `integer`, but null means None and only an absent field means `default`."""
        if not self.has(name):
            return None if name in self.values else default
        return self.integer(name, least=least, most=most)

    def optional_number(self, name: str, *, least: float, most: float, default: float | None) -> float | None:
        """As `number`, but null means None and only an absent field means `default`."""
        if not self.has(name):
            return None if name in self.values else default
        return self.number(name, least=least, most=most)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], *, default: str | None = None) -> str:
        """One of `allowed`; without a default the field is required."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, f"must be one of {', '.join(allowed)}")
        return value

    def items(self, name: str) -> list[object]:
        """A list; an absent field is an empty one, a single value a list of one."""
        value = self.values.get(name)
        if value is None:
            return []
        return value if isinstance(value, list) else [value]

    def inner(self, name: str) -> "ConfigFields":
        """The object under `name`; an absent one is empty."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return ConfigFields(path=self.path, values=value, prefix=f"{self.prefix}{name}.")

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise that field `name` breaks `rule`."""
        raise CheckpointError(f"{self.path}: {self.prefix}{name} {rule}, got {shown(self.values.get(name))}")

    def defer(self, name: str, rule: str) -> NoReturn:
        """As `refuse`, of a value that may well mean something to another implementation of the model."""
        raise UnsupportedVariantError(f"{self.path}: {self.prefix}{name} {rule}, got {shown(self.values.get(name))}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.path}: {self.prefix}{name} is missing")
        return default
