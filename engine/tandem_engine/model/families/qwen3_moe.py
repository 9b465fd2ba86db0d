"""Qwen3-MoE: Qwen3 whose feed-forward blocks are experts, but for layers that its config.json exempts.

`mlp_only_layers` names layers that are dense; of every `decoder_sparse_step` layers only the last has experts.
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, MoeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import MAX_LAYERS, Defaults, read_decoder, require_silu
from tandem_engine.model.expert_fields import expert_count, read_experts
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import in_all_layers, read_window, require_uniform_layers

DEFAULT_WINDOW = 4096


def _read(fields: ConfigFields) -> ModelConfig:
    # Unlike dense Qwen3, transformers derives the size of a head when the config is silent.
    base = read_decoder(fields, family=QWEN3_MOE.name, defaults=Defaults(num_kv_heads=4))
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
    slides = fields.flag("use_sliding_window", default=False)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=DEFAULT_WINDOW, slides=slides)
    if not slides:
        return ()
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    return in_all_layers(window, num_layers=base.num_layers)


def _moe(fields: ConfigFields, num_layers: int) -> MoeConfig:
    return replace(
        read_experts(fields, count=expert_count(fields, "num_experts"), size="moe_intermediate_size"),
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


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=decoder_fields(
        "hidden_act",
        "attention_bias",
        "use_sliding_window",
        "sliding_window",
        "layer_types",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
        "decoder_sparse_step",
        no_effect=("max_window_layers",),
    ),
    read=_read,
)
