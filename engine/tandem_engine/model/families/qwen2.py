"""Qwen2 and Qwen2.5: q, k and v always have a bias, nothing else ever has."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder, require_silu
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import qwen_windows


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN2.name, defaults=Defaults(num_kv_heads=32))
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=True,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=decoder_fields("hidden_act", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    read=_read,
)
