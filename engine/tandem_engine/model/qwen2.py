"""Qwen2 and Qwen2.5: q, k and v always have a bias, nothing else ever has."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.family import Family, Traits


def _traits(_config: ConfigFields) -> Traits:
    return Traits(attention_bias=True)


QWEN2 = Family(name="qwen2", architecture="Qwen2ForCausalLM", read_traits=_traits, has_sliding_window=True)
