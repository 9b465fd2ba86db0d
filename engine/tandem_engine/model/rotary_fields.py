"""Rotary parameters beyond one set of them for whole heads.

`config_fields` reads plain ones. Here are

    partial     the first `partial_rotary_factor` of each head rotates (GLM-4, Phi-4-mini)
    longrope    two sets of divisors of the frequencies, for contexts up to the original one and beyond (Phi-3)
    sets        layers with a window rotate by another set than full ones (Gemma 3, OLMo 3)
    none        some layers do not rotate (SmolLM3, Cohere 2, Llama 4)
"""

from collections.abc import Mapping
from dataclasses import replace

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.config_fields import (
    FULL,
    MAX_FACTOR,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_THETA,
    ORIGINAL,
    SLIDING,
    ConfigFields,
    Defaults,
    read_decoder,
    read_parameters,
    require_whole_rotation,
    rotary_fields,
)
from tandem_engine.model.long_context import LONGROPE

NO_ROTATION = RopeConfig(rope_type="none")

PARTIAL = "partial_rotary_factor"


def read_partial_decoder(fields: ConfigFields, *, family: str, defaults: Defaults, factor: float) -> ModelConfig:
    """As `read_decoder`; a part of each head may rotate. `factor`: that part, of a config that names none."""
    config = read_decoder(fields, family=family, defaults=defaults, partial=True)
    return replace(config, rope=with_rotary_dim(fields, config.rope, head_dim=config.head_dim, factor=factor))


def with_rotary_dim(fields: ConfigFields, rope: RopeConfig, *, head_dim: int, factor: float) -> RopeConfig:
    """`rope` of the dimensions that rotate, by `partial_rotary_factor`, or `factor` if there is none.

    Raises:
        CheckpointError: they are not an even number, and at least 2.
    """
    inner = rotary_fields(fields)
    owner = inner if inner.has(PARTIAL) else fields
    for each in (fields, inner):
        if PARTIAL in each.values and not owner.has(PARTIAL):
            each.defer(PARTIAL, "must be a number")  # transformers takes null for another default
    width = int(head_dim * owner.number(PARTIAL, least=0, most=1, default=factor))
    if width % 2 or width < 2:
        owner.refuse(PARTIAL, f"times head_dim ({head_dim}) must be even and at least 2")
    return rope if width == head_dim else replace(rope, rotary_dim=width)


def read_longrope(fields: ConfigFields, rope: RopeConfig, *, head_dim: int, max_position: int) -> RopeConfig:
    """The parameters of `longrope` in a config whose other rotary parameters are `rope`.

    Args:
        head_dim: dimensions that rotate.
        max_position: `max_position_embeddings`.

    Raises:
        CheckpointError: the divisors are not one positive number for each pair of dimensions.
    """
    inner = rotary_fields(fields)
    original = fields.integer(ORIGINAL, least=2, most=MAX_POSITION, default=4096)
    factor = inner.number("factor", least=1e-3, most=MAX_FACTOR, default=max_position / original)
    attention = inner.number("attention_factor", least=0, most=1e6) if inner.has("attention_factor") else None
    return replace(
        rope,
        rope_type=LONGROPE,
        factor=factor,
        original_max_position=original,
        attention_factor=attention,
        short_factors=_divisors(inner, "short_factor", count=head_dim // 2),
        long_factors=_divisors(inner, "long_factor", count=head_dim // 2),
    )


def _divisors(fields: ConfigFields, name: str, *, count: int) -> tuple[float, ...]:
    values = fields.items(name)
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != len(values) or len(numbers) != count or not all(1e-6 <= value <= 1e6 for value in numbers):
        fields.refuse(name, f"must be a list of {count} positive numbers, one for each pair of dimensions")
    return tuple(numbers)


def read_rope_set(
    fields: ConfigFields, kind: str, *, max_position: int, theta_field: str | None, thetas: Mapping[str, float]
) -> RopeConfig:
    """Rotary parameters of the layers of `kind`, full or with a window, of a family whose kinds have a set each.

    Args:
        theta_field: at the top of config.json, the base of a set that names none; None if there is no such field.
        thetas: the base of each kind for a config that names none.
    """
    require_whole_rotation(fields)
    own = _set_of(fields, kind)
    require_whole_rotation(own)
    theta = thetas[kind]
    if theta_field is not None:
        theta = fields.number(theta_field, least=1.001, most=MAX_THETA, default=theta)
    return read_parameters(own, original=own, base=own, max_position=max_position, theta=theta)


def _set_of(fields: ConfigFields, kind: str) -> ConfigFields:
    """The set of `kind`, wherever it stands.

    Raises:
        CheckpointError: the file has two, or one for all kinds, which transformers passes over.
    """
    sets = fields.inner("rope_parameters")
    for name, value in sets.values.items():
        if name not in (FULL, SLIDING) and value is not None:
            fields.defer("rope_parameters", f"must have one object for {FULL} and one for {SLIDING}, and nothing else")
    if not fields.values.get("rope_scaling"):
        return _untruncated(sets.inner(kind))
    if sets.values:
        fields.refuse("rope_scaling", "and rope_parameters contradict each other; remove one")
    if kind == SLIDING:
        return sets.inner(kind)
    scaling = fields.inner("rope_scaling")
    if scaling.has("type") and not scaling.has("rope_type"):
        scaling.defer("type", "must be spelled rope_type; transformers reads nothing else in a model of this family")
    return _untruncated(scaling)


def _untruncated(own: ConfigFields) -> ConfigFields:
    """transformers looks for `truncate` next to the sets, where it cannot stand."""
    if "truncate" in own.values and own.values["truncate"] is not True:
        own.defer("truncate", "must be true")
    return own


def layers_without_rotation(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Those that `no_rope_layers` has a 0 for; without it every `no_rope_layer_interval`-th one."""
    if not fields.has("no_rope_layers"):
        interval = fields.integer("no_rope_layer_interval", least=1, most=MAX_LAYERS, default=4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    rotates = fields.items("no_rope_layers")
    if len(rotates) < num_layers or not all(type(value) is int and value in (0, 1) for value in rotates):
        fields.refuse("no_rope_layers", f"must have 1 for each of the {num_layers} layers that rotates, else 0")
    return tuple(layer for layer in range(num_layers) if rotates[layer] == 0)
