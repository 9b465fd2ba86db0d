"""LoRA adapters that an engine loads next to its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tandem_engine.base.errors import ConfigError

MAX_NAME_BYTES = 128
MAX_ADAPTERS = 256
"""Of one engine: a worker repeats all of them with each heartbeat."""
DEFAULT_MAX_RANK = 64
DEFAULT_TURN_S = 2.0
MAX_TURN_S = 3600.0


def check_adapter_name(name: str) -> None:
    """Raise `ConfigError` for a name that no adapter can have."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= MAX_NAME_BYTES or set(name) & {"/", ":"} or not name.isprintable():
        raise ConfigError(
            f"adapters: a name has 1 to {MAX_NAME_BYTES} bytes of printable characters without / and :, got "
            f"{name[:80]!r}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSource:
    """Where an adapter is, and the name that requests have for it."""

    name: str
    path: str
    """Folder of a PEFT checkpoint."""

    def __post_init__(self) -> None:
        check_adapter_name(self.name)
        if not self.path or "\0" in self.path:
            raise ConfigError(f"adapters: the folder of {self.name!r} must be a path, got {self.path[:80]!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """All adapters of an engine. Flags name fields as vLLM does."""

    sources: tuple[AdapterSource, ...] = ()
    max_rank: int = DEFAULT_MAX_RANK
    """Of any of their matrices."""
    max_loaded: int = MAX_ADAPTERS
    """Adapters that a worker keeps in memory."""
    folder: str = ""
    """Paths are relative to it and lie in it; "" for any path."""
    turn_s: float = DEFAULT_TURN_S
    """Seconds for which an adapter in memory is used before it makes way for one that waits."""
    allow_updates: bool = False
    """Adapters may be loaded and unloaded while the engine serves."""

    def __post_init__(self) -> None:
        if self.max_rank < 1:
            raise ConfigError(f"max_lora_rank must be at least 1, got {self.max_rank}")
        if not 1 <= self.max_loaded <= MAX_ADAPTERS:
            raise ConfigError(f"--max-cpu-loras must be between 1 and {MAX_ADAPTERS}, got {self.max_loaded}")
        if not 0.0 < self.turn_s <= MAX_TURN_S:
            raise ConfigError(f"--lora-turn must be above 0 and at most {MAX_TURN_S:.0f} seconds, got {self.turn_s}")
        names: set[str] = set()
        for source in self.sources:
            if source.name in names:
                raise ConfigError(f"two adapters have the name {source.name!r}: give each its own")
            names.add(source.name)

    @classmethod
    def of(cls, paths: Mapping[str, object], *, max_rank: int = DEFAULT_MAX_RANK) -> Self:
        """Of folders by name. Raises `ConfigError` for a name that no adapter can have."""
        return cls(
            sources=tuple(AdapterSource(name=name, path=str(path)) for name, path in paths.items()), max_rank=max_rank
        )

    @property
    def may_exist(self) -> bool:
        """Whether requests can have an adapter, now or later."""
        return bool(self.sources) or self.allow_updates

    def located(self, path: str) -> Path:
        """The folder that `path` means. Raises `ConfigError` unless it lies in `folder`, links followed."""
        try:
            if not self.folder:
                return Path(path).expanduser()
            root = Path(self.folder).expanduser().resolve()
            whole = (root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            # A home that no user has, links in a circle, bytes that no path has.
            raise ConfigError(f"{path[:200]!r} is no usable path: {error}") from error
        if not whole.is_relative_to(root):
            raise ConfigError(f"{path!r} is outside --lora-dir: give a path in it, without .. and links that lead out")
        return whole
