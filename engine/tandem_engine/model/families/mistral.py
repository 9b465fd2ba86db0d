"""Mistral: Llama with a sliding window in every layer. A config.json that says null has none, as later versions do."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder, require_silu
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import in_all_layers, read_window, require_uniform_layers

DEFAULT_WINDOW = 4096


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MISTRAL.name, defaults=Defaults(num_kv_heads=8))
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=DEFAULT_WINDOW)
    return replace(
        base,
        activation=require_silu(fields),
        windows=in_all_layers(window, num_layers=base.num_layers),
    )


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    fields=decoder_fields("hidden_act", "sliding_window", "layer_types", no_effect=("max_window_layers",)),
    read=_read,
)
