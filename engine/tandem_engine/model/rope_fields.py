"""Rotary parameters of a config.json, in either spelling.

Since version 5 transformers writes one object, `rope_parameters`, with `rope_theta` inside. Before, the
base stood at the top as `rope_theta` and the scaling apart in `rope_scaling`, whose kind was called `type`
at first. As in transformers, a `rope_scaling` that is not empty wins when a file has both.

Where kinds of layer rotate differently, a family picks the object of a kind itself (`families.gemma3`) and has it read
by `read_parameters`.
"""

from typing import TypedDict

from tandem_engine.config import RopeConfig
from tandem_engine.model.config_fields import ConfigFields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_FIELDS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "finetuned",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
"""What may stand in a set of rotary parameters. Which of them a kind reads follows below; it ignores the others, as in
transformers. Exporters wrote `finetuned` beside YaRN; it has no effect."""
ORIGINAL = "original_max_position_embeddings"
MAX_THETA = 1e12
MAX_FACTOR = 4096.0
MAX_POSITION = 1 << 22


class YarnFields(TypedDict, total=False):
    """Fields of `RopeConfig`."""

    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


def read_rope(config: ConfigFields, *, max_position: int, theta: float = 10000.0) -> RopeConfig:
    """Parse the rotary parameters of a config whose `max_position_embeddings` is `max_position`.

    Args:
        theta: the base when the config names none.

    Raises:
        CheckpointError: unknown kind, a value out of bounds, or a variant that is not supported.
    """
    fields = config.inner("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    # A value at the top of the file wins, as in transformers (Phi-3 has it there).
    original = config if config.has(ORIGINAL) else fields
    base = fields if fields.has("rope_theta") else config
    require_whole_rotation(config)
    return read_parameters(fields, original=original, base=base, max_position=max_position, theta=theta)


def read_parameters(
    fields: ConfigFields, *, original: ConfigFields, base: ConfigFields, max_position: int, theta: float
) -> RopeConfig:
    """One set of rotary parameters.

    Args:
        original: where `original_max_position_embeddings` stands, if anywhere.
        base: where `rope_theta` stands, if anywhere.
        theta: what an absent `rope_theta` stands for.

    Raises:
        CheckpointError: as `read_rope`.
    """
    for name, value in fields.values.items():
        if name not in ROPE_FIELDS and value is not None:
            fields.defer(name, "is no rotary parameter that is known")
    require_whole_rotation(fields)
    spelling = "type" if fields.has("type") and not fields.has("rope_type") else "rope_type"
    if fields.has(spelling) and fields.values[spelling] not in ROPE_TYPES:
        fields.defer(spelling, f"must be one of {', '.join(ROPE_TYPES)}")
    rope_type = fields.choice(spelling, ROPE_TYPES, default="default")
    before = _original_position(original, rope_type=rope_type, max_position=max_position)
    if rope_type == "dynamic" and fields.has(ORIGINAL) and fields.values[ORIGINAL] != max_position:
        fields.defer(ORIGINAL, f"must be max_position_embeddings ({max_position}) for dynamic scaling")
    return RopeConfig(
        rope_type=rope_type,
        theta=base.number("rope_theta", least=1.001, most=MAX_THETA, default=theta),
        factor=_factor(fields, rope_type=rope_type, implied=max_position / before),
        original_max_position=None if rope_type in ("default", "linear") else before,
        low_freq_factor=_llama3_bound(fields, rope_type, "low_freq_factor", otherwise=1.0),
        high_freq_factor=_llama3_bound(fields, rope_type, "high_freq_factor", otherwise=4.0),
        **_yarn(fields, rope_type),
    )


def longest_context(rope: RopeConfig, *, max_position: int) -> int:
    """Positions that the scaling makes usable.

    `max_position_embeddings` of linear checkpoints is the length before scaling, and YaRN names its own; llama3
    checkpoints state the length after scaling. With dynamic scaling the context ends at `max_position_embeddings`:
    beyond it a token's angles depend, in transformers, on the longest sequence of its call, which shared pages cannot.
    """
    if rope.rope_type == "linear":
        return int(max_position * rope.factor)
    if rope.rope_type == "yarn" and rope.original_max_position is not None:
        return int(rope.original_max_position * rope.factor)
    return max_position


def require_whole_rotation(owner: ConfigFields) -> None:
    """Raise `UnsupportedVariantError` where only a part of each head rotates."""
    if owner.number("partial_rotary_factor", least=0, most=1, default=1.0) != 1.0:
        owner.defer("partial_rotary_factor", "must be 1; partial rotary embedding is not supported")


def _original_position(owner: ConfigFields, *, rope_type: str, max_position: int) -> int:
    """Context before scaling."""
    if rope_type not in ("llama3", "yarn"):
        return max_position
    return owner.integer(ORIGINAL, least=1, most=MAX_POSITION, default=max_position)


def _factor(fields: ConfigFields, *, rope_type: str, implied: float) -> float:
    if rope_type == "default":
        return 1.0
    default = implied if rope_type == "yarn" else None
    return fields.number("factor", least=1.0, most=MAX_FACTOR, default=default)


def _llama3_bound(fields: ConfigFields, rope_type: str, name: str, *, otherwise: float) -> float:
    """Required by llama3, which divides by it and by the difference of both."""
    if rope_type != "llama3":
        return otherwise
    value = fields.number(name, least=1e-3, most=1e6)
    if name == "high_freq_factor" and value <= fields.number("low_freq_factor", least=1e-3, most=1e6):
        fields.refuse(name, "must be greater than low_freq_factor")
    return value


def _yarn(fields: ConfigFields, rope_type: str) -> YarnFields:
    """What YaRN alone reads."""
    if rope_type != "yarn":
        return {}
    if "truncate" in fields.values and not fields.has("truncate"):
        fields.refuse("truncate", "must be true or false")  # transformers takes null for false
    return {
        "beta_fast": fields.number("beta_fast", least=1e-3, most=1e6, default=32.0),
        "beta_slow": fields.number("beta_slow", least=1e-3, most=1e6, default=1.0),
        "attention_factor": _optional(fields, "attention_factor"),
        "mscale": _optional(fields, "mscale"),
        "mscale_all_dim": _optional(fields, "mscale_all_dim"),
        "truncate": fields.flag("truncate", default=True),
    }


def _optional(fields: ConfigFields, name: str) -> float | None:
    return fields.number(name, least=0.0, most=1e6) if fields.has(name) else None
