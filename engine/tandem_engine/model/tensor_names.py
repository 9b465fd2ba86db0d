"""The tensors a checkpoint must hold, under their Hugging Face names, and no others."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tandem_engine.config import ModelConfig, MoeConfig
from tandem_engine.errors import CheckpointError
from tandem_engine.model.expert_tensors import ROUTER, expert_name
from tandem_engine.model.json_file import shown
from tandem_engine.model.safetensors_file import ReadableTensor

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
    yield from _attention_shapes(config)
    yield from _norm_shapes(config)
    if config.moe is not None and has_experts(config, layer):
        yield from _expert_shapes(config.moe, config.hidden_size)
    else:
        yield from _feed_forward_shapes(config)


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _linear("self_attn.q_proj", q, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.k_proj", kv, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.v_proj", kv, hidden, bias=config.attention_bias)
    yield from _linear("self_attn.o_proj", hidden, q, bias=config.output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _norm_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if config.sandwich_norms:
        names += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    for name in names:
        yield f"{name}.weight", (config.hidden_size,)


def _feed_forward_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _linear("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, bias=config.mlp_bias)


def _expert_shapes(moe: MoeConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield ROUTER, (moe.num_experts, hidden)
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
