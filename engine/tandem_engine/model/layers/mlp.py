"""The gated feed-forward block:  (norm) ─▶ gate, up ─▶ activation(gate) · up ─▶ down ─▶ (norm)."""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.model.layers.activation import GatedActivation
from tandem_engine.model.layers.linear import Projection
from tandem_engine.model.layers.norm import Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """One pair of projections for every token."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    gate_up: Projection
    activation: GatedActivation
    down: Projection
    output_norm: Norm | None

    def __call__(self, normed: Tensor) -> Tensor:
        """Normalised hidden states [T, hidden] to what is added to them."""
        out = self.down(self.activation(self.gate_up(normed)))
        return out if self.output_norm is None else self.output_norm(out)
