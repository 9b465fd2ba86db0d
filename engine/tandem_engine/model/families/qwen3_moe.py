"""Qwen3-MoE: Qwen3 whose feed-forward blocks are experts, but for layers that its config.json exempts.

`mlp_only_layers` names layers that are dense; of every `decoder_sparse_step` layers only the last has experts.
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, MoeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import MAX_LAYERS, read_decoder, require_silu
from tandem_engine.model.expert_fields import read_experts
from tandem_engine.model.family import Family
from tandem_engine.model.windows import in_all_layers, read_window

DEFAULT_WINDOW = 4096


def _read(fields: ConfigFields) -> ModelConfig:
    # Unlike dense Qwen3, transformers derives the size of a head when the config is silent.
    base = read_decoder(fields, family=QWEN3_MOE.name)
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        windows=_windows(fields, base),
        moe=_moe(fields, base.num_layers),
    )


def _windows(fields: ConfigFields, base: ModelConfig) -> tuple[int | None, ...]:
    """All layers or none."""
    if not fields.flag("use_sliding_window", default=False):
        return ()
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    return in_all_layers(window, num_layers=base.num_layers)


def _moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    # transformers 5 calls the field num_local_experts, the published checkpoints num_experts.
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return replace(
        read_experts(fields, count=count, size="moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", default=False),
        dense_layers=_dense_layers(fields, num_layers),
    )


def _dense_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    named = fields.items("mlp_only_layers")
    for layer in named:
        if type(layer) is not int or not 0 <= layer < num_layers:
            fields.refuse("mlp_only_layers", f"must name layers from 0 to {num_layers - 1}")
    step = fields.integer("decoder_sparse_step", least=1, most=MAX_LAYERS, default=1)
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


QWEN3_MOE = Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_read)
