"""Llama 2 and 3, and whatever else ships as `LlamaForCausalLM`."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder, require_silu
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields


def _read(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_decoder(fields, family=LLAMA.name, defaults=Defaults()),
        activation=require_silu(fields),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fields=decoder_fields("hidden_act", "attention_bias", "mlp_bias", no_effect=("max_window_layers",)),
    read=_read,
)
