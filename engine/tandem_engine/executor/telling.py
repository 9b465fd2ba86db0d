"""Attention that tells of each layer whose KV is written [settled-only-sent]."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem_engine.attention.backend import AttentionPlan, ToldPlan, TurningPlan
from tandem_engine.kernels.head_turn import HeadTurn

Wrote = Callable[[int], None]
"""Called with a layer once its KV is written, or queued to be."""


def telling(plan: AttentionPlan, wrote: Wrote) -> AttentionPlan:
    """`plan`, with word of each layer behind it. It turns heads itself if `plan` does."""
    return TellingPlan(plan, wrote) if isinstance(plan, TurningPlan) else ToldPlan(plan=plan, wrote=wrote)


@dataclass(frozen=True, slots=True)
class TellingPlan(TurningPlan):
    """See `telling`."""

    plan: TurningPlan
    wrote: Wrote

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gathered = self.plan(layer, q, k, v)
        self.wrote(layer)
        return gathered

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        gathered = self.plan.turn_and_attend(layer, q, k, v, turn)
        self.wrote(layer)
        return gathered
