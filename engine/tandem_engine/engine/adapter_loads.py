"""Adapters that are loaded while an engine serves.

    1. load    a thread reads, checks and digests the folder, while steps go on
    2. add     between two steps, on the scheduler's thread (`AdapterTable`)

A folder without an adapter for the model changes nothing.

A file system that hangs fails its loads and no others (`LoadThreads`).
"""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from tandem_engine.base.errors import CheckpointError, ConfigError, EngineError
from tandem_engine.config import AdapterConfig, AdapterSource, ModelConfig
from tandem_engine.engine.load_threads import LoadThreads
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.group import TpGroup

CLOSE_S = 5.0
"""A load in progress has so long to end when the engine closes."""


@dataclass(kw_only=True, slots=True)
class AdapterLoads:
    """Of one engine. Scheduler thread only."""

    table: AdapterTable
    config: AdapterConfig
    base: ModelConfig
    dtype: torch.dtype
    device: str
    group: TpGroup
    close_s: float = CLOSE_S
    threads: "LoadThreads[LoadedAdapters]" = field(default_factory=lambda: LoadThreads(name="adapter"))

    def begin(self, name: str, path: str) -> "Future[LoadedAdapters]":
        """Begin to load the adapter in `path`, which `AdapterTable.add` then takes.

        The future raises `CheckpointError`, naming the field or tensor, for a folder that has no adapter for the model,
        and `ConfigError` for one that is outside of the folder of adapters. Raises `ConfigError` where adapters cannot
        be loaded, or not under this name, and `BusyError` while too many loads hang. Looks at no file: this thread
        computes.
        """
        self.require_allowed()
        source = AdapterSource(name=name, path=path)
        return self.threads.begin(f"adapter {name!r}", lambda: self._load(source))

    @property
    def allowed(self) -> bool:
        """Whether adapters may change while the engine serves."""
        return self.config.allow_updates and self.group.size == 1

    def fileno(self) -> int:
        """Readable when a load has ended since `acknowledge`."""
        return self.threads.fileno()

    def acknowledge(self) -> None:
        """Ended loads have been looked at."""
        self.threads.acknowledge()

    def require_allowed(self) -> None:
        """Raise `ConfigError` where adapters are loaded at start alone."""
        if not self.config.allow_updates:
            raise ConfigError("adapters change at start alone: start this worker with --allow-runtime-lora-updating")
        if self.group.size > 1:
            raise ConfigError(
                f"adapters change at start alone with --tensor-parallel-size {self.group.size}: use --lora-modules"
            )

    def close(self) -> None:
        """Begin no other load, and wait for one in progress for `close_s`. Idempotent."""
        self.threads.close(self.close_s)

    def _load(self, source: AdapterSource) -> LoadedAdapters:
        one = replace(self.config, sources=(source,))
        try:
            return LoadedAdapters.load(one, self.base, dtype=self.dtype, device=self.device, group=self.group)
        except EngineError:
            raise
        except Exception as error:
            # Any exception, most likely of too little memory: the engine continues with what it has.
            raise CheckpointError(
                f"adapter {source.name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
