"""Adapters that are loaded while an engine serves.

    1. load    a thread reads, checks and digests the folder, while steps go on
    2. add     between two steps, on the scheduler's thread (`AdapterTable`)

A folder without an adapter for the model changes nothing.

A file system that hangs keeps the thread in a read that nothing can end. The engine closes without it: the thread is a
daemon, so the process exits as well.
"""

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread

import torch

from tandem_engine.base.errors import CheckpointError, ConfigError, EngineError, EngineStoppedError
from tandem_engine.config import AdapterConfig, AdapterSource, ModelConfig
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.group import TpGroup

CLOSE_S = 5.0
"""A load in progress has so long to end when the engine closes."""

Job = tuple[AdapterSource, "Future[LoadedAdapters]"]


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
    _jobs: "SimpleQueue[Job | None]" = field(default_factory=SimpleQueue)
    """None ends the thread."""
    _begun: "list[Future[LoadedAdapters]]" = field(default_factory=list)
    """Those that may not be done."""
    _ended: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _thread: Thread | None = None
    """Starts with the first load. One at a time, in their order."""
    _closed: bool = False

    def begin(self, name: str, path: str) -> "Future[LoadedAdapters]":
        """Begin to load the adapter in `path`, which `AdapterTable.add` then takes.

        The future raises `CheckpointError`, naming the field or tensor, for a folder that has no adapter for the model,
        and `ConfigError` for one that is outside of the folder of adapters. Raises `ConfigError` where adapters cannot
        be loaded, or not under this name. Looks at no file: this thread computes.
        """
        self.require_allowed()
        if self._closed:
            raise EngineStoppedError("this engine is closed")
        source = AdapterSource(name=name, path=path)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="adapter", daemon=True)
            self._thread.start()
        loading: Future[LoadedAdapters] = Future()
        self._begun.append(loading)
        self._jobs.put((source, loading))
        return loading

    @property
    def allowed(self) -> bool:
        """Whether adapters may change while the engine serves."""
        return self.config.allow_updates and self.group.size == 1

    def fileno(self) -> int:
        """Readable when a load has ended since `acknowledge`."""
        return self._ended

    def acknowledge(self) -> None:
        """Ended loads have been looked at, and are kept here no longer: their adapters may leave the memory."""
        self._begun = [each for each in self._begun if not each.done()]
        with suppress(BlockingIOError):
            os.eventfd_read(self._ended)

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
        self._closed = True
        for loading in self._begun:
            loading.cancel()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(self.close_s)
            if self._thread.is_alive():
                return  # it writes to the descriptor when the file system answers
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._carry_out(*job)
            # This frame would keep the adapter in memory until the next load.
            del job
            os.eventfd_write(self._ended, 1)

    def _carry_out(self, source: AdapterSource, loading: "Future[LoadedAdapters]") -> None:
        if not loading.set_running_or_notify_cancel():
            return
        try:
            loading.set_result(self._load(source))
        except BaseException as error:  # noqa: BLE001  # raised where the future is read
            loading.set_exception(error)

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
