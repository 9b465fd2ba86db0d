"""Attention that turns heads itself, as a device's does, by the layers of a CPU."""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import PromptShape
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.model.attention.backend import GraphPlan, TurningPlan
from tandem_engine.model.attention.reference import TorchReferenceBackend, TorchReferencePlan
from tandem_engine.model.layers.attention import Rotation
from tandem_engine.model.layers.norm import LateRoundingRmsNorm, RmsNorm


class TurningReference(TorchReferenceBackend):
    """`TorchReferenceBackend`, whose plans are `TurningPlan`s. What its graphs cost does not matter."""

    captures_prompts = True
    turned = 0
    """Layers that asked for it."""
    planned = 0
    """Steps that no graph has run."""

    def plan(self, batch: ForwardBatch) -> "TurningReferencePlan":
        self.planned += 1
        return TurningReferencePlan(super().plan(batch), self)

    def graph_plan(self, max_rows: int, max_pages: int) -> "TurningReferencePlan":
        return TurningReferencePlan(super().graph_plan(max_rows, max_pages), self)

    def prompt_graph_plan(self, shape: PromptShape, max_pages: int) -> "TurningReferencePlan":
        return TurningReferencePlan(super().prompt_graph_plan(shape, max_pages), self)


@dataclass(frozen=True)
class TurningReferencePlan(TurningPlan):
    """Around a plan that does not turn heads."""

    inner: TorchReferencePlan | GraphPlan
    backend: TurningReference

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(layer, q, k, v)

    def __getattr__(self, name: str) -> object:
        """What a `GraphPlan` has besides."""
        return getattr(self.inner, name)

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        self.backend.turned += 1
        rotation = Rotation(turn.cos[:, None], turn.signed_sin[:, None])
        heads = q.shape[1]
        if turn.norm is not None:
            weight, eps = turn.norm
            kind = RmsNorm if weight.dtype is q.dtype else LateRoundingRmsNorm
            q, k = kind(weight=weight[:heads], eps=eps)(q), kind(weight=weight[heads:], eps=eps)(k)
        return self.inner(layer, rotation.apply(q), rotation.apply(k), v)
