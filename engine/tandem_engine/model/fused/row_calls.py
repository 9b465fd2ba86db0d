"""The kernels over rows as a step calls them: again and again, with other addresses.

What does not change within a step is filled into their records once: to fill in a hundred anew takes Python as long as
some of the arithmetic of forty decodes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention.cpu import CpuPlan
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
from tandem_engine.model.layers.linear import padded_tokens


class RowCalls:
    """Of one step. Results that are not given a place are overwritten by the next call of the same kind."""

    tokens: int
    query: Tensor
    """[padded T, H, D] float32: what attention is to look for, and zeros."""

    def __init__(self, model: ModelArrays, plan: CpuPlan, positions: Tensor) -> None:
        """`positions` [T] of the tokens: dense, and kept."""
        config, dtype, pages = model.config, dtype_of(model.dtype), plan.kernels.pages
        group, self.tokens = config.num_heads // config.num_kv_heads, len(positions)
        padded = padded_tokens(self.tokens)
        self.query = torch.zeros((padded, config.num_heads, config.head_dim))
        self._plan, self._positions = plan, positions
        self._normed = torch.zeros((padded, config.hidden_size), dtype=model.dtype)
        self._inner = torch.empty((padded, config.intermediate_size), dtype=model.dtype)
        self._weights = {name: (weight.ctypes.data, weight[0].nbytes) for name, weight in model.norms.items()}
        self._norm = _Call(build_norm_kernel(dtype), NORM)
        self._norm.set(size=config.hidden_size, eps=config.rms_eps)
        self._place = _Call(build_place_kernel(dtype, config.head_dim, group), PLACE)
        of_model = ("angles", "num_positions", "head_norm", "num_layers", "num_kv_heads", "eps")
        self._place.set(**{name: model.constant[name][0] for name in of_model})
        self._place.set(page_size=pages.shape[4], pages=pages.ctypes.data, slots=plan.slots.ctypes.data)
        self._place.set(tokens=self.tokens, positions=positions.data_ptr(), query=self.query.data_ptr())
        self._gate = _Call(build_gate_kernel(dtype), GATE)
        self._gate.set(inner=config.intermediate_size)

    def norm(self, hidden: Tensor, delta: Tensor | None, name: str, layer: int, *, out: Tensor | None = None) -> Tensor:
        """hidden [n, E] += delta, and its norm by a weight of `STEP`: [padded n, E], or `out`."""
        tokens = len(hidden)
        normed = _first(self._normed, padded_tokens(tokens)) if out is None else out
        weight, row = self._weights[name]
        self._norm(
            tokens=tokens,
            hidden=hidden.data_ptr(),
            delta=0 if delta is None else delta.data_ptr(),
            weight=weight + layer * row,
            out=normed.data_ptr(),
        )
        return normed

    def place(self, layer: int, qkv: Tensor) -> None:
        """q of qkv [padded T, (H + 2 KV) · D] to `query`, k and v to their pages."""
        self._place(layer=layer, qkv=qkv.data_ptr())

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [n, 2 I]"""
        inner = _first(self._inner, len(gate_up))
        self._gate(tokens=len(gate_up), gate_up=gate_up.data_ptr(), out=inner.data_ptr())
        return inner


class _Call:
    """A kernel and its record."""

    def __init__(self, kernel: RowKernel, fields: "np.dtype[Any]") -> None:
        self._work = np.zeros(1, fields)
        self._record = self._work[0]
        self._run = team().run
        self._given = (kernel.address, self._work.ctypes.data, torch.get_num_threads())

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            self._record[name] = value

    def __call__(self, **fields: int) -> None:
        self._record["next_task"] = 0
        self.set(**fields)
        self._run(*self._given)


def _first(rows: Tensor, count: int) -> Tensor:
    """Some of them, or new ones if there are not as many: who wants a token twice wants more than there are."""
    if count > len(rows):
        return torch.zeros((count, rows.shape[1]), dtype=rows.dtype)
    return rows if count == len(rows) else rows[:count]
