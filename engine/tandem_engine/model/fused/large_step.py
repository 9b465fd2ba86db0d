"""A step of many tokens: products by oneDNN, and what lies between them by compiled calls over rows.

    hidden, delta ─▶ sum, norm ─▶ qkv ─▶ place heads ─▶ attend ─▶ output = delta
    hidden, delta ─▶ sum, norm ─▶ gate_up ─▶ silu(gate) · up ─▶ down = delta

The same arithmetic as `model.layers`, to the bit but for the order in which a norm sums its squares.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention.cpu import CpuPlan
from tandem_engine.attention.pieces import Array
from tandem_engine.attention.team import team
from tandem_engine.model.fused.arrays import ModelArrays
from tandem_engine.model.fused.numbers import dtype_of
from tandem_engine.model.fused.row_kernels import (
    GATE,
    NORM,
    PLACE,
    RowKernel,
    build_gate_kernel,
    build_norm_kernel,
    build_place_kernel,
)
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
        norms, positions = self.model.norms, positions.contiguous()
        hidden, delta = self.model.embedding(input_ids), None
        last = len(self.model.blocks) - 1
        for layer, block in enumerate(self.model.blocks):
            feed_forward = block.feed_forward
            assert isinstance(feed_forward, FeedForward), f"{type(feed_forward).__name__} in a model without experts"
            qkv = block.attention.qkv(self._norm(hidden, delta, norms["attention_norm"][layer]))
            gathered = self._attend(layer, qkv, positions)
            if layer == last:
                # From here on a token serves only itself: most of a prompt need go no further.
                hidden = hidden.index_select(0, wanted)
                gathered = gathered.index_select(0, wanted)
            delta = block.attention.output(gathered)
            normed = self._norm(hidden, delta, norms["feed_forward_norm"][layer])
            delta = feed_forward.down(self._gate(feed_forward.gate_up(normed)))
        return self._norm(hidden, delta, norms["norm"])

    def _require_angles(self, positions: Tensor) -> None:
        least, most = torch.aminmax(positions)
        if int(least) < 0 or int(most) >= int(self.model.constant["num_positions"][0]):
            raise IndexError(f"positions {int(least)} to {int(most)} lie beyond the rotary table")

    def _norm(self, hidden: Tensor, delta: Tensor | None, weight: Array) -> Tensor:
        """hidden += delta, and its norm."""
        out = torch.empty_like(hidden)
        work = np.zeros(1, NORM)
        record = work[0]
        record["tokens"], record["size"] = hidden.shape
        record["hidden"], record["out"], record["weight"] = hidden.data_ptr(), out.data_ptr(), weight.ctypes.data
        record["delta"] = 0 if delta is None else delta.data_ptr()
        record["eps"] = self.model.config.rms_eps
        _run(build_norm_kernel(dtype_of(hidden.dtype)), work)
        return out

    def _attend(self, layer: int, qkv: Tensor, positions: Tensor) -> Tensor:
        """q, k and v [T, (H + 2 KV) · D] to what each token gathered, [T, H · D]."""
        config, constant, pages = self.model.config, self.model.constant, self.plan.kernels.pages
        query = torch.empty((len(qkv), config.num_heads, config.head_dim))
        work = np.zeros(1, PLACE)
        record = work[0]
        for name in ("angles", "num_positions", "head_norm", "num_layers", "num_kv_heads", "eps"):
            record[name] = constant[name][0]
        record["tokens"], record["layer"], record["page_size"] = len(qkv), layer, pages.shape[4]
        record["qkv"], record["positions"], record["query"] = qkv.data_ptr(), positions.data_ptr(), query.data_ptr()
        record["slots"], record["pages"] = self.plan.slots.ctypes.data, pages.ctypes.data
        group = config.num_heads // config.num_kv_heads
        _run(build_place_kernel(dtype_of(qkv.dtype), config.head_dim, group), work)
        gathered = self.plan.gather(layer, query).to(qkv.dtype).flatten(1)
        if self.wrote is not None:
            self.wrote(layer)
        return gathered

    def _gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up"""
        tokens, inner = len(gate_up), self.model.config.intermediate_size
        out = torch.empty((tokens, inner), dtype=gate_up.dtype)
        work = np.zeros(1, GATE)
        record = work[0]
        record["tokens"], record["inner"] = tokens, inner
        record["gate_up"], record["out"] = gate_up.data_ptr(), out.data_ptr()
        _run(build_gate_kernel(dtype_of(gate_up.dtype)), work)
        return out


def _run(kernel: RowKernel, work: Array) -> None:
    team().run(kernel.address, work.ctypes.data, torch.get_num_threads())
