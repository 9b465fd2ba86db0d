"""Mixtral: Mistral whose feed-forward blocks are experts, in every layer."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import read_decoder, require_silu
from tandem_engine.model.expert_fields import read_experts
from tandem_engine.model.family import Family
from tandem_engine.model.windows import in_all_layers, read_window

DEFAULT_THETA = 1_000_000.0


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MIXTRAL.name, rope_theta=DEFAULT_THETA)
    window = read_window(fields, context=base.max_position, default=None)
    return replace(
        base,
        activation=require_silu(fields),
        windows=in_all_layers(window, num_layers=base.num_layers),
        moe=read_experts(fields, count="num_local_experts", size="intermediate_size"),
    )


MIXTRAL = Family(name="mixtral", architecture="MixtralForCausalLM", read=_read)
