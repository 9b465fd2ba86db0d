"""Layers of models with states, from their tensors.

    linear_attn.in_proj_qkvz, in_proj_ba        Qwen3-Next: rows of q, k, v, z (b, a) of one key head after the other
    linear_attn.in_proj_{q,k,v,z,b,a}           Qwen3.5, whose q, k and v are one matrix (`tensor_aliases`)
    linear_attn.conv1d_{q,k,v}                  one matrix in both, which ranks take in three parts
    linear_attn.A_log, dt_bias, norm, out_proj
    self_attn.q_proj                            of each head [query; gate], in the other layers

Ranks divide the key heads, and value heads go with theirs.
"""

import torch
from torch import Tensor

from tandem_engine.config import DeltaConfig, ModelConfig
from tandem_engine.kernels.interface import DeltaKernels, DeltaWeights, by_triton
from tandem_engine.memory.state_pool import PartedSpec, StateSpec, parted_spec
from tandem_engine.model.layers.attention import SelfAttention
from tandem_engine.model.layers.delta import DeltaHeads, GatedAttention, GatedDelta
from tandem_engine.model.layers.linear import Projection
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.tensor_names import DELTA, layer_prefix
from tandem_engine.model.weights import Weights, column_parallel, row_parallel
from tandem_engine.parallel.sharding import OUTPUTS, Split


def heads_of_states(delta: DeltaConfig, size: int) -> DeltaHeads:
    """Of each of `size` ranks, which `require_shareable` has accepted."""
    return DeltaHeads(
        keys=delta.key_heads // size,
        values=delta.value_heads // size,
        key_size=delta.key_size,
        value_size=delta.value_size,
    )


def state_spec(config: ModelConfig, dtype: torch.dtype, size: int) -> StateSpec | PartedSpec | None:
    """What each of `size` ranks keeps of a sequence in layers with states, of a model of `dtype`."""
    if config.state_parts:
        return parted_spec(config.state_parts)
    if config.delta is None:
        return None
    heads = heads_of_states(config.delta, size)
    return StateSpec(
        layers=len(config.delta.layers),
        history=config.delta.kernel - 1,
        channels=2 * heads.key_width + heads.value_width,
        heads=heads.values,
        key_size=heads.key_size,
        value_size=heads.value_size,
        dtype=dtype,
    )


def gated_attention(config: ModelConfig, attention: SelfAttention, weights: Weights, *, layer: int) -> GatedAttention:
    """`attention` of `layer`, with the gates that its q_proj has too."""
    size = config.head_dim
    rows = torch.arange(attention.num_heads * 2 * size).view(-1, 2, size)
    gate = column_parallel(
        weights,
        f"{layer_prefix(layer)}self_attn.q_proj",
        bias=config.attention_bias,
        split=Split(dim=0, unit=2 * size),
        order=rows[:, 1].flatten(),
    )
    return GatedAttention(inner=attention, gate=gate, place=config.paged_layers.index(layer))


def gated_delta(config: ModelConfig, delta: DeltaConfig, weights: Weights, *, layer: int, norm: Norm) -> GatedDelta:
    """Of `layer`; `norm` is that before it."""
    own = f"{layer_prefix(layer)}{DELTA}"
    heads = heads_of_states(delta, weights.group.size)
    inputs, rates = _joined(own, heads, weights) if delta.joined else _apart(own, weights)
    return GatedDelta(
        norm=norm,
        heads=heads,
        place=delta.layers.index(layer),
        inputs=inputs,
        rates=rates,
        weights=DeltaWeights(
            conv=weights.stacked(*(f"{own}conv1d_{name}.weight" for name in "qkv"), split=OUTPUTS)
            .squeeze(1)
            .t()
            .float()
            .contiguous(),
            decay=-_of_rank(weights, f"{own}A_log", heads).exp(),
            bias=_of_rank(weights, f"{own}dt_bias", heads),
            norm=weights.exact(f"{own}norm.weight"),
            eps=config.rms_eps,
        ),
        kernels=_kernels_on(weights.device),
        output=row_parallel(weights, f"{own}out_proj", bias=False, split=Split(dim=1, unit=delta.value_size)),
    )


def _kernels_on(device: torch.device) -> DeltaKernels | None:
    if not by_triton(device):
        return None
    from tandem_engine.kernels.triton.delta_runs import unit_lower_inverse, walk_runs
    from tandem_engine.kernels.triton.delta_step import delta_step

    return DeltaKernels(step=delta_step, inverse=unit_lower_inverse, walk=walk_runs)


def joined_sizes(heads: DeltaHeads) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Outputs of each key head in `in_proj_qkvz` and `in_proj_ba`: q, k, v, z; and b, a."""
    shared = heads.values // heads.keys
    of_values = shared * heads.value_size
    return (heads.key_size, heads.key_size, of_values, of_values), (shared, shared)


def order_by_part(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """int64: which of the outputs, parts of `sizes` for each group, stands at each place, part after part."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1).split_with_sizes(sizes, dim=1)
    return torch.cat([part.flatten() for part in rows])


def _joined(own: str, heads: DeltaHeads, weights: Weights) -> tuple[Projection, Projection]:
    inputs, rates = joined_sizes(heads)
    return (
        _by_part(weights, f"{own}in_proj_qkvz", heads.keys, inputs),
        _by_part(weights, f"{own}in_proj_ba", heads.keys, rates),
    )


def _by_part(weights: Weights, name: str, groups: int, sizes: tuple[int, ...]) -> Projection:
    """A projection whose outputs are parts of `sizes` for each of this rank's groups: part after part instead."""
    split = Split(dim=0, unit=sum(sizes))
    return column_parallel(weights, name, bias=False, split=split, order=order_by_part(groups, sizes))


def _apart(own: str, weights: Weights) -> tuple[Projection, Projection]:
    inputs, rates = ([f"{own}in_proj_{name}" for name in names] for names in ("qkvz", "ba"))
    return (
        column_parallel(weights, *inputs, bias=False, split=OUTPUTS),
        column_parallel(weights, *rates, bias=False, split=OUTPUTS),
    )


def _of_rank(weights: Weights, name: str, heads: DeltaHeads) -> Tensor:
    """A number of each value head that this rank has, float32."""
    return weights.exact(name).narrow(0, weights.group.rank * heads.values, heads.values).clone()
