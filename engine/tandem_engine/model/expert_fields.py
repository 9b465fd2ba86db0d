"""Mixture-of-experts fields of config.json, in the names that a family gives them."""

from tandem_engine.config import MoeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import MAX_INTERMEDIATE
from tandem_engine.model.json_file import shown

MAX_EXPERTS = 4096
MAX_EXPERTS_PER_TOKEN = 256


def read_experts(fields: ConfigFields, *, count: str, size: str) -> MoeConfig:
    """Experts whose number is in field `count` and whose width is in field `size`, weights normalised.

    Raises:
        CheckpointError: a number is missing or out of bounds, or a token would choose more than there are.
    """
    num_experts = fields.integer(count, least=1, most=MAX_EXPERTS)
    chosen = fields.integer("num_experts_per_tok", least=1, most=MAX_EXPERTS_PER_TOKEN)
    if chosen > num_experts:
        fields.refuse("num_experts_per_tok", f"must be at most {count} ({num_experts})")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=fields.integer(size, least=1, most=MAX_INTERMEDIATE),
        normalise=True,
    )


def expert_count(fields: ConfigFields, usual: str) -> str:
    """Name of the field with the number of experts: `usual`, or the other one of the two that transformers has.

    Raises:
        CheckpointError: the config has both, and they differ.
    """
    first, second = "num_local_experts", "num_experts"
    if fields.has(first) and fields.has(second) and fields.values[first] != fields.values[second]:
        fields.refuse(second, f"must be {first} ({shown(fields.values[first])}) where a file has both")
    return next((name for name in (first, second) if fields.has(name)), usual)
