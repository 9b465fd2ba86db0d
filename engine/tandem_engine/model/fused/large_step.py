"""A step of many tokens: products by oneDNN, and what lies between them by compiled calls over rows.

    hidden, delta ─▶ sum, norm ─▶ qkv ─▶ place heads ─▶ attend ─▶ output = delta
    hidden, delta ─▶ sum, norm ─▶ gate_up ─▶ silu(gate) · up ─▶ down = delta

What oneDNN is given has a number of rows that it likes (`padded_tokens`): there are some behind the last token, of
zeros or another token's numbers, whose results nobody reads.

The same arithmetic as `model.layers`, to the bit but for the order in which a norm sums its squares.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.attention.cpu import CpuPlan
from tandem_engine.model.fused.arrays import ModelArrays
from tandem_engine.model.fused.row_calls import RowCalls
from tandem_engine.model.layers.linear import padded_tokens
from tandem_engine.model.layers.mlp import FeedForward


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeStep:
    """A step for oneDNN and the kernels over rows."""

    model: ModelArrays
    plan: CpuPlan
    wrote: Callable[[int], object] | None
    """Told of each layer whose K and V are stored, when somebody sends pages meanwhile."""

    def forward(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        self._require_angles(positions)
        calls = RowCalls(self.model, self.plan, positions.contiguous())
        hidden, delta = self.model.embedding(input_ids), None
        last = len(self.model.blocks) - 1
        for layer, block in enumerate(self.model.blocks):
            feed_forward = block.feed_forward
            assert isinstance(feed_forward, FeedForward), f"{type(feed_forward).__name__} in a model without experts"
            calls.place(layer, block.attention.qkv(calls.norm(hidden, delta, "attention_norm", layer)))
            gathered = self._attend(calls, layer)
            if layer == last:
                # From here on a token serves only itself: most of a prompt need go no further.
                hidden = hidden.index_select(0, wanted)
                gathered = gathered.index_select(0, _padded(wanted))
            delta = block.attention.output(gathered.to(hidden.dtype))
            normed = calls.norm(hidden, delta, "feed_forward_norm", layer)
            delta = feed_forward.down(calls.gate(feed_forward.gate_up(normed)))
        return calls.norm(hidden, delta, "norm", 0, out=torch.empty_like(hidden))

    def _require_angles(self, positions: Tensor) -> None:
        least, most = torch.aminmax(positions)
        if int(least) < 0 or int(most) >= int(self.model.constant["num_positions"][0]):
            raise IndexError(f"positions {int(least)} to {int(most)} lie beyond the rotary table")

    def _attend(self, calls: RowCalls, layer: int) -> Tensor:
        """What all tokens gather, float32 [padded T, H · D]."""
        gathered = self.plan.gather(layer, calls.query).flatten(1)
        if len(gathered) > calls.tokens:
            gathered[calls.tokens :].zero_()
        if self.wrote is not None:
            self.wrote(layer)
        return gathered


def _padded(wanted: Tensor) -> Tensor:
    """With as many more indices, of the first token, as `padded_tokens` asks for."""
    return F.pad(wanted, (0, padded_tokens(len(wanted)) - len(wanted)))
