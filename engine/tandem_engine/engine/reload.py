"""New weights for a running engine, of the same architecture, on all of its ranks or on none.

    1. load     every rank loads its part on a separate thread, next to the old weights, while requests continue
    2. agree    once per iteration the ranks compare their progress; all have ended before anything follows
    3. swap     between two steps, in the same iteration on every rank (`Engine.replace_model`)
       keep     a rank could not load its part: the old weights keep serving

Memory must hold both sets of weights for a while. In return a checkpoint that is absent, damaged or of another shape
changes nothing. The swap (`replace_weights`):

    1. quiesce      no step is in flight
    2. install      the model, and the scales of float8 pages
    3. self-test    on all ranks; weights that fail it are taken out again, and nothing has changed
    4. forget       started requests end, and no KV of the old weights stays

Started requests end with a retryable error, because an output must not mix two models. The gateway resumes them on a
worker of its choice, from what their clients already have (ADR 4).
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

import torch

from tandem_engine.base.errors import BusyError, CheckpointError, ConfigError, EngineError, EngineStoppedError
from tandem_engine.base.freed_memory import give_back
from tandem_engine.base.thread_pools import started_pool
from tandem_engine.engine.assembly import EngineParts
from tandem_engine.engine.loaded_model import LoadedModel, scales_of_rank
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.model.base import StepModel
from tandem_engine.parallel.agreement import Agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reloaded:
    """What a reload did."""

    path: str
    fingerprint: str
    ended: int
    """Running requests that failed with a retryable error."""


class LoadState(IntEnum):
    """How far a rank has come. The least of all ranks' is what they act on."""

    LOADING = 0
    FAILED = 1
    LOADED = 2


@dataclass(kw_only=True, slots=True)
class WeightsReload:
    """At most one reload at a time. Scheduler thread only."""

    load: "Callable[[str], LoadedModel]"
    """This rank's part of the checkpoint in a folder, if it can take the place of what serves."""
    replace: "Callable[[LoadedModel], int]"
    """See `Engine.replace_model`."""
    agreement: Agreement
    rank: int
    size: int
    _path: str = ""
    _loading: "Future[LoadedModel] | None" = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: started_pool(1, name="reload"))
    _answer: "Future[Reloaded] | None" = None
    """Of rank 0, from the order to its end."""

    @property
    def active(self) -> bool:
        """Weights are requested or being loaded."""
        return self._loading is not None or self._answer is not None

    def expect(self) -> "Future[Reloaded]":
        """What the reload that is about to `start` will come to. Rank 0 only. Raises `BusyError` during another."""
        if self.active:
            raise BusyError("a reload is in progress: wait until it has completed")
        self._answer = Future()
        return self._answer

    def start(self, path: str) -> None:
        """Begin to load `path`, in the same turn on every rank."""
        assert self._loading is None, f"a reload of {self._path} is in progress"
        self._path = path
        self._loading = self._thread.submit(self._load)

    def poll(self) -> bool:
        """Once a turn: swap when all ranks have their weights. True if a reload ended."""
        if self._loading is None:
            return False
        mine = _state(self._loading)
        # `size` is no rank: it stands for those that have not failed.
        state, failed = self.agreement.least([mine, self.rank if mine is LoadState.FAILED else self.size])
        if state == LoadState.LOADING:
            return False
        loading, self._loading = self._loading, None
        answer, self._answer = self._answer or Future(), None
        try:
            answer.set_result(self._swap(loading, failed))
        except EngineError as error:
            logger.warning("rank %d keeps its weights: %s", self.rank, error)
            answer.set_exception(error)
        return True

    def close(self) -> None:
        """Wait for a load in progress, and forget it. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._loading = None
        if self._answer is not None:
            self._answer.set_exception(EngineStoppedError("the engine was closed before its new weights were loaded"))
            self._answer = None

    def _load(self) -> "LoadedModel":
        try:
            return self.load(self._path)
        except EngineError:
            raise
        except Exception as error:
            # Any exception, most likely of too little memory for both: the engine keeps its weights.
            raise CheckpointError(f"{self._path} cannot be loaded: {type(error).__name__}: {error}") from error

    def _swap(self, loading: "Future[LoadedModel]", failed: int) -> Reloaded:
        loaded = loading.result()
        if failed < self.size:
            raise CheckpointError(f"rank {failed} cannot load its part of {self._path}: its log line has the reason")
        ended = self.replace(loaded)
        give_back()
        return Reloaded(path=self._path, fingerprint=loaded.model_config.fingerprint, ended=ended)


def _state(loading: "Future[LoadedModel]") -> LoadState:
    if not loading.done():
        return LoadState.LOADING
    return LoadState.LOADED if loading.exception() is None else LoadState.FAILED


MODEL_REPLACED = Finish(
    reason=FinishReason.ERROR, error="the model's weights were replaced", code="model_replaced", retryable=True
)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What steps compute with."""

    model: StepModel
    scales: torch.Tensor | None
    """Of pages of float8."""

    @classmethod
    def serving(cls, parts: EngineParts) -> Self:
        return cls(parts.runner.model, parts.pools.scales)

    def install(self, parts: EngineParts) -> None:
        parts.runner.model = self.model
        if self.scales is not None:
            parts.pools.set_scales(self.scales)


def require_replaceable(memory: KvMemory) -> None:
    """Raise `ConfigError` when the weights cannot be replaced, whatever by."""
    if memory.host is not None:
        raise ConfigError(
            "weights are not reloaded while host memory or files hold KV of the old ones "
            "(--enable-hierarchical-cache, --swap-space): start a worker with the new ones"
        )


def replace_weights(parts: EngineParts, loaded: LoadedModel, *, self_test: Callable[[], object]) -> int:
    """Compute with `loaded` from the next step on. Returns the number of requests that this has ended.

    Raises:
        EngineError: `self_test` did, or it failed otherwise. Nothing has changed.
    """
    parts.scheduler.stand_still()
    old = _Weights.serving(parts)
    _Weights(loaded.model, None if old.scales is None else scales_of_rank(loaded)).install(parts)
    try:
        self_test()
    except Exception as error:
        old.install(parts)
        if isinstance(error, EngineError):
            raise
        where = loaded.config.model_path
        raise CheckpointError(f"the weights in {where} do not compute: {type(error).__name__}: {error}") from error
    ended = parts.scheduler.end_started(MODEL_REPLACED)
    parts.scheduler.forget_kv()
    return ended
