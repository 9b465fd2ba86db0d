"""Qwen2 and Qwen2.5: q, k and v always have a bias, nothing else ever has."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import read_decoder, require_silu
from tandem_engine.model.family import Family
from tandem_engine.model.windows import qwen_windows


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN2.name)
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=True,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN2 = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=_read)
