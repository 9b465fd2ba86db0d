"""Qwen3 (dense): q and k are normalised per head before rotation, and heads have a size of their own."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.family import Family, Traits

DEFAULT_HEAD_DIM = 128


def _traits(config: ConfigFields) -> Traits:
    attention_bias = config.flag("attention_bias", default=False)
    return Traits(
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        head_dim=DEFAULT_HEAD_DIM,
    )


QWEN3 = Family(name="qwen3", architecture="Qwen3ForCausalLM", read_traits=_traits, has_sliding_window=True)
