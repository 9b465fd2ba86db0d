"""Mixtral: Mistral whose feed-forward blocks are experts, in every layer."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder, require_silu
from tandem_engine.model.expert_fields import expert_count, read_experts
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import in_all_layers, read_window, require_uniform_layers

DEFAULTS = Defaults(num_kv_heads=8, rms_eps=1e-5, rope_theta=1_000_000.0)


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MIXTRAL.name, defaults=DEFAULTS)
    window = read_window(fields, context=base.max_position, default=None)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=None)
    return replace(
        base,
        activation=require_silu(fields),
        windows=in_all_layers(window, num_layers=base.num_layers),
        moe=read_experts(fields, count=expert_count(fields, "num_local_experts"), size="intermediate_size"),
    )


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    fields=decoder_fields(
        "hidden_act",
        "sliding_window",
        "layer_types",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        no_effect=("max_window_layers",),
    ),
    read=_read,
)
