"""Adapters that are loaded while an engine serves.

    1. load     a thread of each rank reads, checks and digests the folder, while steps continue
    2. agree    several ranks compare their progress once a turn: a load has ended when all ranks have
    3. add      between two steps, on the scheduler's thread (`AdapterTable`)

A folder without an adapter for the model changes nothing, on any rank. A file system that hangs fails its loads and no
others (`LoadThreads`).
"""

import logging
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch

from tandem_engine.base.errors import BusyError, CheckpointError, ConfigError, EngineError
from tandem_engine.config import AdapterConfig, AdapterSource, ModelConfig
from tandem_engine.engine.load_threads import LoadThreads
from tandem_engine.model.adapters.loaded import LoadedAdapters, require_same_content
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import TpGroup

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""A load in progress has so long to end when the engine closes."""


class LoadState(IntEnum):
    """How far a rank has come. The least of all ranks' is what they act on."""

    LOADING = 0
    FAILED = 1
    BUSY = 2
    """Failed for now: a file system hangs, or there is no thread."""
    LOADED = 3

    @classmethod
    def of(cls, loading: "Future[LoadedAdapters]") -> "LoadState":
        """Of one rank's part."""
        if not loading.done():
            return cls.LOADING
        error = CancelledError() if loading.cancelled() else loading.exception()
        if isinstance(error, BusyError):
            return cls.BUSY
        return cls.LOADED if error is None else cls.FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedLoad:
    """One of several ranks' loads of an adapter."""

    name: str
    part: "Future[LoadedAdapters]"
    """Of this rank."""
    whole: "Future[LoadedAdapters]"
    """Done in the same turn on every rank."""


@dataclass(kw_only=True, slots=True)
class AdapterLoads:
    """Of one engine. Scheduler thread only."""

    table: AdapterTable
    config: AdapterConfig
    base: ModelConfig
    dtype: torch.dtype
    device: str
    group: TpGroup
    """For this rank's place. Its collectives are those of the forward thread."""
    agreement: Agreement
    keeps_halves: bool = False
    """See `load_adapter`."""
    close_s: float = CLOSE_S
    threads: "LoadThreads[LoadedAdapters]" = field(default_factory=lambda: LoadThreads(name="adapter"))
    _shared: list[_SharedLoad] = field(default_factory=list)
    """Of several ranks, in the order in which all began them."""

    def begin(self, name: str, path: str) -> "Future[LoadedAdapters]":
        """Begin to load the adapter in `path`, which `AdapterTable.add` then takes. Every rank does, in the same turn.

        The future raises `CheckpointError`, naming the field or tensor, for a folder that has no adapter for the model,
        `ConfigError` for one that is outside of the folder of adapters, and `BusyError` for a file system that hangs.
        Raises `ConfigError` where adapters cannot be loaded, or not under this name, and `BusyError` while too many
        loads hang. Looks at no file: this thread computes.
        """
        self.require_allowed()
        source = AdapterSource(name=name, path=path)
        if self.agreement.alone:
            return self._begin(source)
        load = _SharedLoad(name=name, part=self._begin_part(source), whole=Future())
        self._shared.append(load)
        return load.whole

    @property
    def allowed(self) -> bool:
        """Whether adapters may change while the engine serves."""
        return self.config.allow_updates

    @property
    def awaits_ranks(self) -> bool:
        """Another rank may be about to end a load, which wakes no thread here."""
        return bool(self._shared)

    def poll(self) -> None:
        """Once a turn: loads end that have ended on every rank."""
        if not self._shared:
            return
        self._shared = [load for load in self._shared if not self._given_up(load)]
        states = self.agreement.least([LoadState.of(load.part) for load in self._shared])
        ended = [load for load, state in zip(self._shared, states, strict=True) if state != LoadState.LOADING]
        self._shared = [load for load, state in zip(self._shared, states, strict=True) if state == LoadState.LOADING]
        for load, state in zip(ended, (state for state in states if state != LoadState.LOADING), strict=True):
            self._end(load, LoadState(state))

    def fileno(self) -> int:
        """Readable when a load of this rank has ended since `acknowledge`."""
        return self.threads.fileno()

    def acknowledge(self) -> None:
        """Ended loads have been looked at."""
        self.threads.acknowledge()

    def require_allowed(self) -> None:
        """Raise `ConfigError` where adapters are loaded at start alone."""
        if not self.config.allow_updates:
            raise ConfigError("adapters change at start alone: start this worker with --allow-runtime-lora-updating")

    def close(self) -> None:
        """Begin no other load, and wait for one in progress for `close_s`. Idempotent."""
        self.threads.close(self.close_s)

    def _begin(self, source: AdapterSource) -> "Future[LoadedAdapters]":
        return self.threads.begin(f"adapter {source.name!r}", lambda: self._load(source))

    def _begin_part(self, source: AdapterSource) -> "Future[LoadedAdapters]":
        """A rank that cannot begin has a part that failed: the others have begun theirs."""
        try:
            return self._begin(source)
        except EngineError as error:
            failed: Future[LoadedAdapters] = Future()
            failed.set_exception(error)
            return failed

    def _given_up(self, load: _SharedLoad) -> bool:
        if load.whole.cancelled():
            load.part.cancel()
        return load.whole.cancelled()

    def _end(self, load: _SharedLoad, state: LoadState) -> None:
        try:
            loaded = self._whole(load, state)
        except EngineError as error:
            load.whole.set_exception(error)
        else:
            load.whole.set_result(loaded)

    def _whole(self, load: _SharedLoad, state: LoadState) -> LoadedAdapters:
        if state is LoadState.LOADED:
            loaded = load.part.result()
            require_same_content(loaded.names, self.agreement.least)
            return loaded
        if LoadState.of(load.part) is not LoadState.LOADED:
            logger.warning("rank %d: %s", self.group.rank, load.part.exception())
        if LoadState.of(load.part) is state:
            load.part.result()
        kind = BusyError if state is LoadState.BUSY else CheckpointError
        raise kind(f"adapter {load.name!r} cannot be loaded on another rank: its log line has the reason")

    def _load(self, source: AdapterSource) -> LoadedAdapters:
        one = replace(self.config, sources=(source,))
        try:
            return LoadedAdapters.load(
                one,
                self.base,
                dtype=self.dtype,
                device=self.device,
                group=self.group,
                keeps_halves=self.keeps_halves,
            )
        except EngineError:
            raise
        except Exception as error:
            # Any exception, most likely of too little memory: the engine continues with what it has.
            raise CheckpointError(
                f"adapter {source.name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
