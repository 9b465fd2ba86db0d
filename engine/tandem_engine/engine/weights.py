"""Other weights of the same architecture in the place of those that serve, between two steps.

    1. stand still  no step is in flight
    2. install      the model, and the scales of float8 pages
    3. self-test    on all ranks; what computes nonsense is taken out again, and nothing has changed
    4. forget       requests that have begun end, for an answer of two models is none; no KV of the old weights stays

`reload` loads them, and has all ranks do this in the same turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from tandem_engine.engine.parts import EngineParts
from tandem_engine.errors import CheckpointError, ConfigError, EngineError
from tandem_engine.kv_shape import scales_of_rank
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.model.base import StepModel

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
        scales = parts.pool.scales
        return cls(parts.runner.model, None if scales is None else scales.clone())

    def install(self, parts: EngineParts) -> None:
        parts.runner.model = self.model
        if self.scales is not None:
            parts.pool.set_scales(self.scales)


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
