"""Experts of a real model at the sizes of a decode step and of a prompt.

A decode cannot do without reading the experts that some token has chosen, and is measured against copy bandwidth; a
prompt cannot do without its multiplications.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu.cases import Case, CaseMaker
from tandem_engine.kernels.triton.fused_moe import fused_experts

MAX_READ = 256
"""Tokens of a step that is bound by what it reads."""


class ExpertCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        hidden, inner, count = self.shape.hidden, self.shape.expert_inner, self.shape.experts
        gate_up, down = self.randn(count, 2 * inner, hidden), self.randn(count, hidden, inner)
        for tokens in self.sizes.expert_tokens:
            yield partial(self._experts, tokens, gate_up=gate_up, down=down)

    def _experts(self, tokens: int, *, gate_up: torch.Tensor, down: torch.Tensor) -> Case:
        shape, count = self.shape, self.shape.experts
        chosen = shape.experts_per_token
        x = self.randn(tokens, shape.hidden)
        experts = torch.rand((tokens, count), device=self.device).topk(chosen, dim=1).indices.int()
        weights = self.randn(tokens, chosen)
        read = len(experts.unique()) * (gate_up.nbytes + down.nbytes) // count
        few = tokens <= MAX_READ
        return Case(
            name=f"fused MoE, {tokens} tokens, {chosen} of {count} experts",
            run=lambda: fused_experts(x, experts, weights, gate_up, down, activation="silu"),
            ceiling="copy" if few else "matmul",
            work=read + 2 * x.nbytes if few else 6 * tokens * chosen * shape.hidden * shape.expert_inner,
            target=0.65 if few else 0.45,
        )
