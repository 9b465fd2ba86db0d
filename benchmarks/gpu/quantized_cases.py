"""Products by quantized weights: one projection of a real model, and experts, in the formats that checkpoints have.

A decode cannot do without reading codes, scales and zero points, and is measured against copy bandwidth; a prompt
cannot do without its multiplications. The peer is torch's product by a matrix of that size in the dtype, which reads
two to four times as much. Of experts a decode reads those that a token selected.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from gpu.cases import Case, CaseMaker
from tandem_engine.kernels.interface import INT4, INT8, PACKED_FLOAT8, PackedWeight
from tandem_engine.kernels.triton.fused_moe import fused_experts
from tandem_engine.kernels.triton.quantized_gemm import quantized_linear


class Format(NamedTuple):
    name: str
    coding: str
    group_size: int | None
    """None: one scale for each output."""
    zeros: bool


FORMATS = (
    Format("AWQ", INT4, 128, zeros=True),
    Format("int8", INT8, None, zeros=False),
    Format("fp8, 128 × 128", PACKED_FLOAT8, 128, zeros=False),
)
DECODES = (1, 8, 32)
CHOSEN = 2
"""Experts of a token."""


class QuantizedCases(CaseMaker):
    """Of the projection from the inner size to the hidden one, and of experts."""

    def cases(self) -> Iterator[Callable[[], Case]]:
        for kind in FORMATS:
            for tokens in (*DECODES, self.sizes.prompt):
                yield partial(self._product, kind, tokens)
                yield partial(self._experts, kind, tokens)

    def _product(self, kind: Format, tokens: int) -> Case:
        weight = self._weight(kind, self.shape.hidden, self.shape.inner)
        plain = self.randn(self.shape.hidden, self.shape.inner)
        x, outputs = self.randn(tokens, weight.inputs), weight.outputs
        moved = weight.nbytes + x.nbytes + tokens * outputs * self.dtype.itemsize
        few = tokens <= max(DECODES)
        return Case(
            name=f"product by {kind.name} weights, {tokens} tokens",
            run=lambda: quantized_linear(x, weight),
            ceiling="copy" if few else "matmul",
            work=moved if few else 2 * tokens * outputs * weight.inputs,
            peers={"torch in the dtype": lambda: linear(x, plain)},
        )

    def _experts(self, kind: Format, tokens: int) -> Case:
        hidden, inner = self.shape.hidden, self.sizes.expert_inner
        gate_up, down = self._stack(kind, 2 * inner, hidden), self._stack(kind, hidden, inner)
        x, weights = self.randn(tokens, hidden), self.randn(tokens, CHOSEN)
        experts = torch.rand((tokens, self.sizes.experts), device=self.device).topk(CHOSEN, dim=1).indices
        few = tokens <= max(DECODES)
        read = len(experts.unique()) * (gate_up.nbytes + down.nbytes) // self.sizes.experts
        return Case(
            name=f"fused MoE by {kind.name} weights, {tokens} tokens, {CHOSEN} of {self.sizes.experts} experts",
            run=lambda: fused_experts(x, experts, weights, gate_up, down, activation="silu"),
            ceiling="copy" if few else "matmul",
            work=read + 2 * x.nbytes if few else 6 * tokens * CHOSEN * hidden * inner,
        )

    def _stack(self, kind: Format, outputs: int, inputs: int) -> PackedWeight:
        """The same matrix for every expert: what it holds does not matter."""
        matrix = self._weight(kind, outputs, inputs)
        stack = matrix.room_for(self.sizes.experts)
        for expert in range(self.sizes.experts):
            stack.put(expert, matrix)
        return stack

    def _weight(self, kind: Format, outputs: int, inputs: int) -> PackedWeight:
        group_size = inputs if kind.group_size is None else min(kind.group_size, inputs)
        groups = -(-inputs // group_size)
        largest = 16 if kind.coding == INT4 else 127
        codes, zeros = (
            torch.randint(0, largest, (outputs, size), dtype=torch.uint8, device=self.device)
            for size in (inputs, groups)
        )
        scales = torch.rand((outputs, groups), device=self.device).half()
        given = zeros if kind.zeros else None
        return PackedWeight.pack(codes, scales, given, coding=kind.coding, group_size=group_size)
