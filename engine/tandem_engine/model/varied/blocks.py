"""Layers of models whose layers differ, from their tensors (Gemma 4).

    layer_scalar                                                factor of what a layer leaves
    per_layer_input_gate, per_layer_projection,
    post_per_layer_input_norm                                   its further inputs
    router.proj, router.scale, router.per_expert_scale          which experts, next to `mlp`
    pre_feedforward_layernorm_2, post_feedforward_layernorm_1,
    post_feedforward_layernorm_2                                norms of experts and of the block next to them
    model.embed_tokens_per_layer, per_layer_model_projection,
    per_layer_projection_norm                                   of all layers

Every rank has all of what is not a projection of attention, of a block or of experts.
"""

import math

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig, VariedConfig
from tandem_engine.model.layers.linear import Projection, TokenEmbedding, projection
from tandem_engine.model.layers.mlp import FeedForward, gated
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.layers.varied import (
    BesideExperts,
    ChosenExperts,
    FurtherInputs,
    InputBlock,
    LayerEnd,
    ReadingAttention,
)
from tandem_engine.model.tensor_names import (
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_TABLE,
    LAYER_SCALE,
    ROUTER_EXPERT_SCALE,
    ROUTER_SCALE,
    layer_prefix,
)
from tandem_engine.model.weights import Weights, column_parallel, row_parallel, token_embedding
from tandem_engine.parallel.group import SingleRank
from tandem_engine.parallel.sharding import Split


def further_inputs(config: ModelConfig, weights: Weights) -> FurtherInputs | None:
    """Of all layers; None where they have no further inputs."""
    varied = config.varied
    if varied is None or not varied.input_size:
        return None
    return FurtherInputs(
        table=_input_table(weights, varied),
        projection=_plain(weights, INPUT_PROJECTION),
        scale=config.hidden_size**-0.5,
        norm=_norm(config, weights, INPUT_NORM),
        size=varied.input_size,
    )


def _input_table(weights: Weights, varied: VariedConfig) -> TokenEmbedding:
    # Rows are too short to be shared by ranks: each has all of them.
    return token_embedding(weights.stacked(INPUT_TABLE), SingleRank(), scale=math.sqrt(varied.input_size))


def layer_end(config: ModelConfig, varied: VariedConfig, weights: Weights, *, layer: int) -> LayerEnd:
    """Of `layer`."""
    prefix = layer_prefix(layer)
    block = None
    if varied.input_size:
        block = InputBlock(
            gate=_plain(weights, f"{prefix}per_layer_input_gate"),
            activation=gated(config.activation, weights.device),
            projection=_plain(weights, f"{prefix}per_layer_projection"),
            norm=_norm(config, weights, f"{prefix}post_per_layer_input_norm"),
        )
    return LayerEnd(block=block, scale=weights.stacked(f"{prefix}{LAYER_SCALE}"))


def reading_attention(config: ModelConfig, weights: Weights, *, layer: int, heads: int, norm: Norm) -> ReadingAttention:
    """Of a layer without K and V; `config` is that of the layer, `heads` its query heads on this rank."""
    own, size = f"{layer_prefix(layer)}self_attn.", config.head_dim
    weight = weights.stacked(f"{own}q_norm.weight").expand(heads, -1)
    return ReadingAttention(
        norm=norm,
        source=config.source_of(layer),
        query=column_parallel(weights, f"{own}q_proj", bias=config.attention_bias, split=Split(dim=0, unit=size)),
        query_norm=rms_norm(weight, eps=config.rms_eps, kind=config.norm),
        output=row_parallel(weights, f"{own}o_proj", bias=config.output_bias, split=Split(dim=1, unit=size)),
        output_norm=_norm(config, weights, f"{layer_prefix(layer)}post_attention_layernorm"),
        head_dim=size,
    )


def value_norm(config: ModelConfig, weights: Weights, *, heads: int) -> Norm:
    """Of `heads` KV heads, by no weights."""
    return rms_norm(_ones(weights, heads, config.head_dim), eps=config.rms_eps, kind=config.norm)


def beside_experts(
    config: ModelConfig, weights: Weights, block: FeedForward, experts: ChosenExperts, *, layer: int
) -> BesideExperts:
    """Both of `layer`. `block` ends with the norm that is for the sum here, and gets its own."""
    prefix = layer_prefix(layer)
    scale = weights.exact(f"{prefix}{ROUTER_SCALE}") * config.hidden_size**-0.5
    return BesideExperts(
        block=block,
        experts=experts,
        router_norm=rms_norm(scale, eps=config.rms_eps, kind=config.norm),
        expert_scale=weights.stacked(f"{prefix}{ROUTER_EXPERT_SCALE}"),
        experts_norm=_norm(config, weights, f"{prefix}post_feedforward_layernorm_2"),
        output_norm=_norm(config, weights, f"{prefix}post_feedforward_layernorm"),
    )


def _plain(weights: Weights, name: str) -> Projection:
    """Not rounded: such a matrix is small, and every rank has all of it."""
    return projection(weights.stacked(f"{name}.weight"))


def _ones(weights: Weights, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=weights.dtype, device=weights.device)


def _norm(config: ModelConfig, weights: Weights, name: str) -> Norm:
    return rms_norm(weights.stacked(f"{name}.weight"), eps=config.rms_eps, kind=config.norm)
