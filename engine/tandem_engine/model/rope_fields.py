"""Rotary parameters of a config.json, in either spelling.

Since version 5 transformers writes one object, `rope_parameters`, with `rope_theta` inside. Before, the
base stood at the top as `rope_theta` and the scaling apart in `rope_scaling`, whose kind was called `type`
at first. As in transformers, `rope_scaling` wins when a file has both.

Where kinds of layer rotate differently, `rope_parameters` holds an object per kind, and the older spelling
means the layers with full attention.
"""

from tandem_engine.config import RopeConfig
from tandem_engine.model.config_fields import ConfigFields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_THETA = 1e12
MAX_FACTOR = 4096.0
MAX_POSITION = 1 << 22


def read_rope(
    config: ConfigFields, *, max_position: int, theta: float = 10000.0, layer_kind: str | None = None
) -> RopeConfig:
    """Parse the rotary parameters of a config whose `max_position_embeddings` is `max_position`.

    Args:
        theta: the base when the config names none.
        layer_kind: the kind of layer whose own parameters to take, if the config has such; None where all
            layers share one set.

    Raises:
        CheckpointError: unknown kind, a value out of bounds, or a variant that is not supported.
    """
    fields = _object(config, layer_kind)
    theta_from = fields if fields.has("rope_theta") else config
    rope_type = fields.choice("type" if _spells_type(fields) else "rope_type", ROPE_TYPES, default="default")
    original = _original_position(config, fields, rope_type=rope_type, max_position=max_position)
    return RopeConfig(
        rope_type=rope_type,
        theta=theta_from.number("rope_theta", least=1.001, most=MAX_THETA, default=theta),
        factor=_factor(fields, rope_type=rope_type, implied=max_position / original),
        original_max_position=None if rope_type in ("default", "linear") else original,
        low_freq_factor=_llama3_bound(fields, rope_type, "low_freq_factor", otherwise=1.0),
        high_freq_factor=_llama3_bound(fields, rope_type, "high_freq_factor", otherwise=4.0),
        beta_fast=fields.number("beta_fast", least=1e-3, most=1e6, default=32.0),
        beta_slow=fields.number("beta_slow", least=1e-3, most=1e6, default=1.0),
        attention_factor=_optional(fields, "attention_factor"),
        mscale=_optional(fields, "mscale"),
        mscale_all_dim=_optional(fields, "mscale_all_dim"),
        truncate=fields.flag("truncate", default=True),
    )


def longest_context(rope: RopeConfig, *, max_position: int) -> int:
    """Positions that the scaling makes usable.

    `max_position_embeddings` of linear and dynamic checkpoints is the length before scaling, and YaRN names
    its own; llama3 checkpoints state the length after scaling.
    """
    if rope.rope_type in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.rope_type == "yarn" and rope.original_max_position is not None:
        return int(rope.original_max_position * rope.factor)
    return max_position


def has_rope_of(config: ConfigFields, layer_kind: str) -> bool:
    """Whether the config has rotary parameters for layers of `layer_kind` alone."""
    return config.has("rope_parameters") and config.inner("rope_parameters").has(layer_kind)


def _differs_by_kind(config: ConfigFields) -> bool:
    return any(isinstance(value, dict) for value in config.inner("rope_parameters").values.values())


def _object(config: ConfigFields, layer_kind: str | None) -> ConfigFields:
    if layer_kind is not None and _differs_by_kind(config):
        if config.has("rope_scaling"):
            config.refuse("rope_scaling", "and rope_parameters contradict each other; remove one")
        fields = config.inner("rope_parameters").inner(layer_kind)
    else:
        fields = config.inner("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    for name, value in fields.values.items():
        if isinstance(value, dict):
            fields.refuse(name, "is a set of its own; rotary parameters that differ by layer are not supported")
    for owner in (config, fields):
        if owner.number("partial_rotary_factor", least=0, most=1, default=1.0) != 1.0:
            owner.refuse("partial_rotary_factor", "must be 1; partial rotary embedding is not supported")
    return fields


def _spells_type(fields: ConfigFields) -> bool:
    return fields.has("type") and not fields.has("rope_type")


def _original_position(config: ConfigFields, fields: ConfigFields, *, rope_type: str, max_position: int) -> int:
    """Context before scaling. A value at the top of the file wins, as in transformers (Phi3 puts it there)."""
    if rope_type not in ("llama3", "yarn"):
        return max_position
    owner = config if config.has("original_max_position_embeddings") else fields
    return owner.integer("original_max_position_embeddings", least=1, most=MAX_POSITION, default=max_position)


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


def _optional(fields: ConfigFields, name: str) -> float | None:
    return fields.number(name, least=0.0, most=1e6) if fields.has(name) else None
