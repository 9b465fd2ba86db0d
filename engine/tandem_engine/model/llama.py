"""Llama 2 and 3, and whatever else ships as `LlamaForCausalLM`."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.family import Family, Traits


def _traits(config: ConfigFields) -> Traits:
    attention_bias = config.flag("attention_bias", default=False)
    return Traits(
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )


LLAMA = Family(name="llama", architecture="LlamaForCausalLM", read_traits=_traits)
