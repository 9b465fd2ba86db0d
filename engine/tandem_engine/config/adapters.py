"""LoRA adapters that an engine loads next to its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tandem_engine.base.errors import ConfigError

MAX_NAME_BYTES = 128
DEFAULT_MAX_RANK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSource:
    """Where an adapter is, and the name that requests have for it."""

    name: str
    path: str
    """Folder of a PEFT checkpoint."""

    def __post_init__(self) -> None:
        size = len(self.name.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_NAME_BYTES or "\0" in self.name or "/" in self.name:
            raise ConfigError(
                f"adapters: a name has 1 to {MAX_NAME_BYTES} bytes without / and NUL, got {self.name[:80]!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """All adapters of an engine."""

    sources: tuple[AdapterSource, ...] = ()
    max_rank: int = DEFAULT_MAX_RANK
    """Of any of their matrices."""

    def __post_init__(self) -> None:
        if self.max_rank < 1:
            raise ConfigError(f"max_lora_rank must be at least 1, got {self.max_rank}")

    @classmethod
    def of(cls, paths: Mapping[str, object], *, max_rank: int = DEFAULT_MAX_RANK) -> Self:
        """Of folders by name. Raises `ConfigError` for a name that no adapter can have."""
        return cls(
            sources=tuple(AdapterSource(name=name, path=str(path)) for name, path in paths.items()), max_rank=max_rank
        )
