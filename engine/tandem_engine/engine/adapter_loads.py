"""Adapters that are loaded while an engine serves.

    1. load    a thread reads, checks and digests the folder, while steps go on
    2. add     between two steps, on the scheduler's thread (`AdapterTable`)

A folder without an adapter for the model changes nothing.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from tandem_engine.base.errors import CheckpointError, ConfigError, EngineError
from tandem_engine.config import AdapterConfig, AdapterSource, ModelConfig
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.group import TpGroup


@dataclass(kw_only=True, slots=True)
class AdapterLoads:
    """Of one engine. Scheduler thread only."""

    table: AdapterTable
    config: AdapterConfig
    base: ModelConfig
    dtype: torch.dtype
    device: str
    group: TpGroup
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter")
    )
    """Starts with the first load. One at a time, in their order."""

    def begin(self, name: str, path: str, *, replaces: bool) -> "Future[LoadedAdapters]":
        """Begin to load the adapter in `path`, which `AdapterTable.add` then takes.

        The future raises `CheckpointError`, naming the field or tensor, for a folder that has no adapter for the model,
        and `ConfigError` for one that is outside of the folder of adapters. Raises `ConfigError` where adapters cannot
        be loaded, or not under this name. Looks at no file: this thread computes.
        """
        self.require_allowed()
        source = AdapterSource(name=name, path=path)
        self.table.require_name(name, replaces=replaces)
        return self._thread.submit(self._load, source)

    def require_allowed(self) -> None:
        """Raise `ConfigError` where adapters are loaded at start alone."""
        if not self.config.allow_updates:
            raise ConfigError("adapters change at start alone: start this worker with --allow-runtime-lora-updating")
        if self.group.size > 1:
            raise ConfigError(
                f"adapters change at start alone with --tensor-parallel-size {self.group.size}: use --lora-modules"
            )

    def close(self) -> None:
        """Wait for a load in progress, and begin no other. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

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
