"""Which models and which steps compiled code computes beyond attention and products.

    model           float32 or bfloat16 on a CPU, whole on one rank; plain blocks: an RMS norm before attention and one
                    before a SwiGLU feed-forward, one rotation, one kind of attention and no cap on its scores
    small step      at most `FEW_TOKENS`, all of whose attention reads pages in place: decodes, drafts, a few tokens on
                    a cached prefix. One call
    large step      any other

Everything else takes the layers of `Decoder` one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tandem_engine.attention.backend import ToldPlan
from tandem_engine.attention.cpu import CpuPlan
from tandem_engine.attention.spec import AttentionSpec, distinct
from tandem_engine.config import Activation, ModelConfig, NormKind
from tandem_engine.model.base import Attend
from tandem_engine.model.fused.arrays import ModelArrays
from tandem_engine.model.fused.kernel import StepKernel, build_step_kernel
from tandem_engine.model.fused.large_step import LargeStep
from tandem_engine.model.fused.numbers import dtype_of
from tandem_engine.model.fused.panels import steps_of
from tandem_engine.model.fused.small_step import SmallStep
from tandem_engine.model.layers.embedding import TokenEmbedding
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.layers.rotary import RotaryTable
from tandem_engine.model.weights import Weights

if TYPE_CHECKING:
    from tandem_engine.model.decoder import Block

FEW_TOKENS = 32
"""With more of them oneDNN's products are faster by more than the calls between them cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedStack:
    """A decoder up to its last norm."""

    kernel: StepKernel
    arrays: ModelArrays

    def step_of(self, attend: Attend, tokens: int) -> SmallStep | LargeStep | None:
        """The step of so many tokens that `attend` was planned for, if it is one for compiled code."""
        plan, wrote = (attend.plan, attend.wrote) if isinstance(attend, ToldPlan) else (attend, None)
        if not isinstance(plan, CpuPlan) or plan.kernels.pages.dtype != dtype_of(self.arrays.dtype):
            return None
        view = plan.read_in_place() if tokens <= FEW_TOKENS and wrote is None else None
        if view is None or view.paged is None:
            return LargeStep(model=self.arrays, plan=plan, wrote=wrote)
        return SmallStep(kernel=self.kernel, model=self.arrays, plan=plan, queries=view.paged, scale=view.spec.scale)


def fuse(
    config: ModelConfig,
    weights: Weights,
    *,
    embedding: TokenEmbedding,
    blocks: "Sequence[Block]",
    rotary: RotaryTable,
    norm: Norm,
    specs: Sequence[AttentionSpec],
) -> FusedStack | None:
    """The kernel for a decoder of these parts, or None when it does not cover the model."""
    if not (_is_plain(config, specs) and _is_here(weights) and _has_whole_steps(config, weights.dtype)):
        return None
    arrays = ModelArrays.of(config, weights.dtype, embedding=embedding, blocks=blocks, rotary=rotary, norm=norm)
    if arrays is None:
        return None
    group = config.num_heads // config.num_kv_heads
    return FusedStack(kernel=build_step_kernel(dtype_of(weights.dtype), config.head_dim, group), arrays=arrays)


def _is_plain(config: ModelConfig, specs: Sequence[AttentionSpec]) -> bool:
    """Whether the kernel has all that the model computes."""
    kinds, _ = distinct(specs)
    return (
        config.norm is NormKind.PLAIN
        and not config.sandwich_norms
        and config.activation is Activation.SILU
        and config.moe is None
        and config.local_rope is None
        and config.embedding_scale == 1.0
        and len(kinds) == 1
        and kinds[0].soft_cap is None
    )


def _is_here(weights: Weights) -> bool:
    supported = weights.dtype in (torch.float32, torch.bfloat16)
    return supported and weights.group.size == 1 and weights.device.type == "cpu"


def _has_whole_steps(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether no projection ends with a part of a step; an even number of inputs is all that it takes."""
    inputs = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return all(each % steps_of(dtype) == 0 for each in inputs)
