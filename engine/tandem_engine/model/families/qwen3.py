"""Qwen3 (dense): q and k are normalised per head before rotation, and heads have a size of their own."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder, require_silu
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import qwen_windows


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN3.name, defaults=Defaults(head_dim=128, num_kv_heads=32))
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=decoder_fields(
        "hidden_act", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "attention_bias"
    ),
    read=_read,
)
