"""Which models and which steps the fused kernel computes, and their weights in its layout.

    model    float32 on a CPU, whole on one rank; plain blocks: an RMS norm before attention and one before a SwiGLU
             feed-forward, one rotation, one kind of attention and no cap on its scores; every projection a number of
             whole panels; and at most `MAX_WEIGHT_BYTES` in its blocks, of which the kernel has a copy of its own
    step     all of its attention reads pages in place (decodes, drafts, a few tokens on a cached prefix), and further
             threads would not help: there are none, or it has few tokens and attention little to read

Everything else takes the layers of `Decoder` one by one. So larger models always do: their arithmetic is far longer
than what lies between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem_engine.attention.cpu import CpuPlan, View
from tandem_engine.attention.cpu_kernels import Array
from tandem_engine.attention.spec import AttentionSpec, distinct
from tandem_engine.attention.vectors import PANEL
from tandem_engine.config import Activation, ModelConfig, NormKind
from tandem_engine.model.base import Attend
from tandem_engine.model.fused import gemm
from tandem_engine.model.fused.kernel import HeadKernel, StackArrays, StackKernel, build_head_kernel, build_stack_kernel
from tandem_engine.model.layers.embedding import Embedding, TokenEmbedding
from tandem_engine.model.layers.linear import Linear, PackedLinear, Projection
from tandem_engine.model.layers.mlp import FeedForward
from tandem_engine.model.layers.norm import Norm, RmsNorm
from tandem_engine.model.layers.rotary import RotaryTable
from tandem_engine.model.weights import Weights

if TYPE_CHECKING:
    from tandem_engine.model.decoder import Block

MAX_WEIGHT_BYTES = 64 << 20
"""A step of larger blocks takes several milliseconds, to which the calls between its operations add little."""
FEW_TOKENS = 32
"""So many take one thread without calls in between no longer than several threads with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedStack:
    """A decoder up to its last norm, computed by one call."""

    kernel: StackKernel
    arrays: StackArrays
    eps: float

    def step_of(self, attend: Attend, tokens: int) -> "FusedStep | None":
        """The step of so many tokens that `attend` was planned for, if it is one for the kernel."""
        if not isinstance(attend, CpuPlan) or (tokens > FEW_TOKENS and torch.get_num_threads() > 1):
            return None
        view = attend.read_in_place()
        return None if view is None else FusedStep(stack=self, plan=attend, view=view)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedStep:
    """A step for the kernel."""

    stack: FusedStack
    plan: CpuPlan
    view: View

    def forward(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        work, stack = self.view.paged, self.stack
        assert work is not None, "a step that reads pages in place has queries"
        out = stack.kernel(
            input_ids.numpy(),
            positions.numpy(),
            wanted.numpy(),
            self.plan.slots,
            self.plan.kernels.pages,
            work.page_table,
            work.tasks,
            work.queries,
            stack.arrays,
            np.float32(stack.eps),
            np.float32(self.view.spec.scale),
        )
        return torch.from_numpy(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedHead:
    """Implements `Projection`: a few rows by the kernel, many by the projection it stands for."""

    kernel: HeadKernel
    panels: Array
    many: Projection

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > FEW_TOKENS:
            return self.many(x)
        return torch.from_numpy(self.kernel(x.contiguous().numpy(), self.panels))


def fuse_head(projection: Projection) -> Projection:
    """`projection`, of a model that `fuse` covers, or the kernel for it, when that covers it too."""
    weight = _weight(projection)
    if weight.numel() * weight.itemsize > MAX_WEIGHT_BYTES or len(weight) % PANEL or _bias(projection) is not None:
        return projection
    return FusedHead(kernel=build_head_kernel(), panels=gemm.pack(weight), many=projection)


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
    if not (_is_plain(config, specs) and _is_here(weights) and _fits(config)):
        return None
    group = config.num_heads // config.num_kv_heads
    return FusedStack(
        kernel=build_stack_kernel(config.head_dim, group),
        arrays=_arrays(embedding, blocks, rotary, norm),
        eps=config.rms_eps,
    )


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
    return weights.group.size == 1 and weights.dtype is torch.float32 and weights.device.type == "cpu"


def _fits(config: ModelConfig) -> bool:
    """Whether projections are cut into whole panels, and small enough to be there twice."""
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = (
        (rows, config.hidden_size),
        (config.hidden_size, config.num_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    )
    size = config.num_layers * sum(outputs * inputs for outputs, inputs in shapes) * torch.float32.itemsize
    return size <= MAX_WEIGHT_BYTES and all(outputs % PANEL == 0 for outputs, _ in shapes)


def _arrays(embedding: TokenEmbedding, blocks: "Sequence[Block]", rotary: RotaryTable, norm: Norm) -> StackArrays:
    assert isinstance(embedding, Embedding), f"{type(embedding).__name__} on a single rank"
    attention = [block.attention for block in blocks]
    feed_forward = [_dense(block.feed_forward) for block in blocks]
    head_norms = [part.qk_norm for part in attention if part.qk_norm is not None]
    return StackArrays(
        embedding=embedding.weight.numpy(),
        angles=rotary.angles.numpy(),
        attention_norm=_norm_weights([part.norm for part in attention]),
        qkv=_packed([part.qkv for part in attention]),
        qkv_bias=_biases([part.qkv for part in attention]),
        head_norm=_norm_weights(head_norms) if head_norms else np.empty((0, 0, 0), np.float32),
        output=_packed([part.output for part in attention]),
        output_bias=_biases([part.output for part in attention]),
        feed_forward_norm=_norm_weights([part.norm for part in feed_forward]),
        gate_up=_packed([part.gate_up for part in feed_forward]),
        gate_up_bias=_biases([part.gate_up for part in feed_forward]),
        down=_packed([part.down for part in feed_forward]),
        down_bias=_biases([part.down for part in feed_forward]),
        norm=_norm_weight(norm),
    )


def _dense(part: object) -> FeedForward:
    assert isinstance(part, FeedForward), f"{type(part).__name__} in a model without experts"
    return part


def _norm_weights(norms: Sequence[Norm]) -> Array:
    return np.stack([_norm_weight(norm) for norm in norms])


def _norm_weight(norm: Norm) -> Array:
    assert isinstance(norm, RmsNorm), f"{type(norm).__name__} is no plain norm"
    return norm.weight.numpy()


def _packed(projections: Sequence[Projection]) -> Array:
    return np.stack([gemm.pack(_weight(projection)) for projection in projections])


def _weight(projection: Projection) -> Tensor:
    """[out, in] as stored."""
    if isinstance(projection, PackedLinear):
        return projection.packed.to_dense()
    assert isinstance(projection, Linear), f"{type(projection).__name__} on a single rank"
    return projection.weight


def _biases(projections: Sequence[Projection]) -> Array:
    """[L, out], or [0, 0] without a bias."""
    biases = [bias.numpy() for part in projections if (bias := _bias(part)) is not None]
    return np.stack(biases) if biases else np.empty((0, 0), np.float32)


def _bias(projection: Projection) -> Tensor | None:
    assert isinstance(projection, Linear | PackedLinear), f"{type(projection).__name__} on a single rank"
    return projection.bias
