"""The tensors that a checkpoint must hold, under their Hugging Face names, and no others.

Experts of a layer are stored under several names:

    published Mixtral      block_sparse_moe.gate.weight, block_sparse_moe.experts.3.{w1,w3,w2}.weight
    published Qwen3-MoE    mlp.gate.weight, mlp.experts.3.{gate_proj,up_proj,down_proj}.weight
    transformers 5         mlp.gate.weight, mlp.experts.gate_up_proj [E, 2·I, hidden], mlp.experts.down_proj
                           [E, hidden, I]: its layout in memory, written if it saves without conversion

The second naming is used here. A stacked tensor becomes one entry per expert and projection, each a range of the same
file, so experts are loaded, checked, sharded and fingerprinted like any other matrix.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import DeltaConfig, LatentConfig, ModelConfig, MoeConfig, NormPlacement, QkNorm, VariedConfig
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor
from tandem_engine.model.checkpoint_folder import shown
from tandem_engine.model.config_fields import MAX_EXPERTS

ROUTER, ROUTER_BIAS = "mlp.gate.weight", "mlp.gate.bias"
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
SHARED_EXPERT = "mlp.shared_expert"
SHARED_GATE = "mlp.shared_expert_gate.weight"
SINKS = "self_attn.sinks"
DELTA = "linear_attn."
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
INPUT_PROJECTION = "model.per_layer_model_projection"
INPUT_NORM = "model.per_layer_projection_norm"
LAYER_SCALE = "layer_scalar"
KEY_VALUE = ("self_attn.v_proj.", "self_attn.k_proj.", "self_attn.k_norm.", "self_attn.v_norm.")
"""What a layer that reads K and V of another does not have."""
ROUTER_SCALE, ROUTER_EXPERT_SCALE = "router.scale", "router.per_expert_scale"
_MIXTRAL = ".block_sparse_moe."
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")


def expert_name(expert: int, projection: str) -> str:
    """Name within its layer of `gate_proj`, `up_proj`, `gate_up_proj` or `down_proj` of one expert."""
    return f"mlp.experts.{expert}.{projection}.weight"


def expert_bias_name(expert: int, projection: str) -> str:
    """Of the bias of such a projection."""
    return f"mlp.experts.{expert}.{projection}.bias"


def canonical_experts(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with experts under our names. What is no expert, or has an odd shape, keeps its name."""
    result: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        if stacked and isinstance(tensor, StoredTensor) and _can_unstack(stacked["name"], tensor.shape):
            result.update(_unstack(stacked["experts"], stacked["name"], tensor))
        else:
            result[_renamed(name)] = tensor
    return result


def _renamed(name: str) -> str:
    if _MIXTRAL not in name:
        return name
    parts = name.replace(_MIXTRAL, ".mlp.").split(".")
    return ".".join(_MIXTRAL_PROJECTIONS.get(part, part) for part in parts)


def _projections(name: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)


def _can_unstack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] <= MAX_EXPERTS and shape[1] % len(_projections(name)) == 0


def _unstack(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Rows of an expert follow each other in the file, those of its gate before those of its up projection."""
    projections = _projections(name)
    count, rows, columns = tensor.shape
    shape = (rows // len(projections), columns)
    size = shape[0] * columns * tensor.dtype.itemsize
    for index in range(count):
        for place, projection in enumerate(projections):
            offset = tensor.offset + (index * len(projections) + place) * size
            yield (
                f"{experts}.{index}.{projection}.weight",
                replace(tensor, shape=shape, offset=offset, size=size),
            )


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that `config` implies, by name."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes[LM_HEAD] = table
    if config.varied is not None:
        shapes |= dict(_further_shapes(config, config.varied))
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _block_shapes(config, layer)}
    return shapes


def require_tensors(config: ModelConfig, tensors: Mapping[str, ReadableTensor], *, where: Path) -> None:
    """Compare what the files hold with what the config implies.

    Raises:
        CheckpointError: a tensor is missing, has another shape, holds no floating-point numbers of 16 or 32 bits, or
            belongs to no part of the model.
    """
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"the weights in {where} lack tensor {name}{_advice(name)}")
        require_weights(stored, shape)
    for name, stored in tensors.items():
        if name not in shapes and not _is_redundant(name, config):
            raise CheckpointError(
                f"{stored.path}: tensor {shown(name)} is no part of a {config.family} model as config.json "
                "describes it; is this the config.json of another checkpoint?"
            )


def require_weights(stored: ReadableTensor, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless `stored` holds numbers of that shape that weights can be made of."""
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}; config.json implies {list(shape)}"
        )
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} is {str(stored.dtype).removeprefix('torch.')}; weights are float32, "
            "bfloat16 or float16, unless config.json has a quantization_config for them"
        )


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and layer not in config.moe.dense_layers


def _block_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.varied is not None:
        yield from _varied_shapes(config.of_layer(layer), config.varied, layer)
        return
    if config.delta is not None and layer in config.delta.layers:
        yield from _delta_shapes(config.hidden_size, config.delta)
    else:
        yield from _attention_shapes(config)
    yield from _norm_shapes(config)
    if config.moe is not None and has_experts(config, layer):
        yield from _expert_shapes(config.moe, config.hidden_size)
    else:
        yield from _feed_forward_shapes(config)


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.latent is not None:
        yield from _latent_shapes(config, config.latent)
        return
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _linear("self_attn.q_proj", 2 * q if config.output_gate else q, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.k_proj", kv, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.v_proj", kv, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.o_proj", hidden, q, bias=config.output_bias)
    if config.attention_sinks:
        yield SINKS, (config.num_heads,)
    if config.qk_norm not in (None, QkNorm.ROTATED_PLAIN):
        whole = config.qk_norm is QkNorm.WHOLE
        yield "self_attn.q_norm.weight", (q if whole else config.head_dim,)
        yield "self_attn.k_norm.weight", (kv if whole else config.head_dim,)


def _further_shapes(config: ModelConfig, varied: VariedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of what all layers share, by whole names."""
    if varied.input_size:
        width = config.num_layers * varied.input_size
        yield INPUT_TABLE, (varied.input_vocab_size, width)
        yield f"{INPUT_PROJECTION}.weight", (width, config.hidden_size)
        yield f"{INPUT_NORM}.weight", (varied.input_size,)


def _varied_shapes(config: ModelConfig, varied: VariedConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a layer whose heads and feed-forward block are those of `config`."""
    hidden = config.hidden_size
    without: tuple[str, ...] = ()
    if layer in config.reading_layers:
        without = KEY_VALUE
    elif varied.keys_are_values and layer in config.second_layers:
        without = KEY_VALUE[:1]
    yield from (named for named in _attention_shapes(config) if not named[0].startswith(without))
    yield from _norm_shapes(config)
    yield from _feed_forward_shapes(config)
    yield LAYER_SCALE, (1,)
    if varied.input_size:
        yield "per_layer_input_gate.weight", (varied.input_size, hidden)
        yield "per_layer_projection.weight", (hidden, varied.input_size)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if config.moe is not None:
        yield from _expert_shapes(config.moe, hidden)
        yield ROUTER_SCALE, (hidden,)
        yield ROUTER_EXPERT_SCALE, (config.moe.num_experts,)
        for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            yield f"{name}.weight", (hidden,)


def _latent_shapes(config: ModelConfig, latent: LatentConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden_size, config.num_heads
    if latent.query_rank is None:
        yield "self_attn.q_proj.weight", (heads * latent.query_size, hidden)
    else:
        yield from _linear("self_attn.q_a_proj", latent.query_rank, hidden, bias=config.attention_bias)
        yield "self_attn.q_a_layernorm.weight", (latent.query_rank,)
        yield "self_attn.q_b_proj.weight", (heads * latent.query_size, latent.query_rank)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent.width, hidden, bias=config.attention_bias)
    yield "self_attn.kv_a_layernorm.weight", (latent.rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (latent.plain_size + latent.value_size), latent.rank)
    yield from _linear("self_attn.o_proj", hidden, heads * latent.value_size, bias=config.output_bias)


def _delta_shapes(hidden: int, delta: DeltaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys, values, heads = delta.key_width, delta.value_width, delta.value_heads
    if delta.joined:
        yield f"{DELTA}in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield f"{DELTA}in_proj_ba.weight", (2 * heads, hidden)
    else:
        for name, rows in (("q", keys), ("k", keys), ("v", values), ("z", values), ("b", heads), ("a", heads)):
            yield f"{DELTA}in_proj_{name}.weight", (rows, hidden)
    for name, rows in (("q", keys), ("k", keys), ("v", values)):
        yield f"{DELTA}conv1d_{name}.weight", (rows, 1, delta.kernel)
    yield f"{DELTA}A_log", (heads,)
    yield f"{DELTA}dt_bias", (heads,)
    yield f"{DELTA}norm.weight", (delta.value_size,)
    yield f"{DELTA}out_proj.weight", (hidden, values)


_NORMS = {
    NormPlacement.BEFORE: ("input_layernorm", "post_attention_layernorm"),
    NormPlacement.AROUND: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    NormPlacement.AFTER: ("post_attention_layernorm", "post_feedforward_layernorm"),
    NormPlacement.SHARED: ("input_layernorm",),
}


def _norm_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in _NORMS[config.norm_placement]:
        yield f"{name}.weight", (config.hidden_size,)


def _feed_forward_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _gated_block_shapes("mlp", config.hidden_size, config.intermediate_size, bias=config.mlp_bias)


def _gated_block_shapes(name: str, hidden: int, inner: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias=bias)


def _expert_shapes(moe: MoeConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield ROUTER, (moe.num_experts, hidden)
    if moe.choice_bias:
        yield CHOICE_BIAS, (moe.num_experts,)
    if moe.shared is not None:
        yield from _gated_block_shapes(SHARED_EXPERT, hidden, moe.shared.intermediate_size, bias=False)
        if moe.shared.gated:
            yield SHARED_GATE, (1, hidden)
    if moe.bias:
        yield ROUTER_BIAS, (moe.num_experts,)
    if moe.interleaved:
        for expert in range(moe.num_experts):
            yield from _linear(f"mlp.experts.{expert}.gate_up_proj", 2 * moe.intermediate_size, hidden, bias=moe.bias)
            yield from _linear(f"mlp.experts.{expert}.down_proj", hidden, moe.intermediate_size, bias=moe.bias)
        return
    for expert in range(moe.num_experts):
        yield expert_name(expert, "gate_proj"), (moe.intermediate_size, hidden)
        yield expert_name(expert, "up_proj"), (moe.intermediate_size, hidden)
        yield expert_name(expert, "down_proj"), (hidden, moe.intermediate_size)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Left over by older exporters: a copy of tied embeddings, and frequencies that config.json implies."""
    return (config.tie_embeddings and name == LM_HEAD) or name.endswith(".rotary_emb.inv_freq")


def _advice(name: str) -> str:
    if name == LM_HEAD:
        return "; set tie_word_embeddings to true in config.json if the model shares it with the embedding"
    return "; download the checkpoint again"
