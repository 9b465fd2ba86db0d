"""Gemma 3, text only: q and k are normalised, five layers with a window to each one without.

Layers with a window rotate by a base of their own. config.json has both sets of rotary parameters under
`rope_parameters`, or, as published, `rope_theta` and `rope_scaling` for the full layers and
`rope_local_base_freq` for the others. Its `max_position_embeddings` is the context after scaling.
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import MAX_LAYERS, Defaults, read_positions, read_sizes
from tandem_engine.model.families.gemma import GEMMA_FIELDS, as_gemma
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.rope_fields import read_parameters, require_whole_rotation
from tandem_engine.model.windows import FULL, SLIDING, in_sliding_layers, read_layer_kinds

DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, tie_embeddings=True)
DEFAULT_WINDOW = 4096
DEFAULT_PATTERN = 6
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
THETA_FIELD = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
MAX_CAP = 1e6


def _read(fields: ConfigFields) -> ModelConfig:
    context = read_positions(fields)
    rope = _rope(fields, FULL, max_position=context)
    base = read_sizes(fields, family=GEMMA3.name, defaults=DEFAULTS, rope=rope, context=context)
    if fields.has("attn_logit_softcapping"):
        fields.defer("attn_logit_softcapping", "must be null; Gemma 3 does not cap attention scores")
    kinds = _layer_kinds(fields, base.num_layers)
    return replace(
        as_gemma(fields, base),
        qk_norm=True,
        windows=in_sliding_layers(fields, kinds, context=context, default=DEFAULT_WINDOW),
        local_rope=_rope(fields, SLIDING, max_position=context),
        local_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", least=1e-3, most=MAX_CAP, default=None),
    )


def _layer_kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Published checkpoints give the pattern as a number, or leave it at six."""
    pattern = fields.integer("sliding_window_pattern", least=1, most=MAX_LAYERS, default=DEFAULT_PATTERN)
    default = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    return read_layer_kinds(fields, default=default)


def _rope(fields: ConfigFields, kind: str, *, max_position: int) -> RopeConfig:
    """Rotary parameters of the layers of `kind`."""
    require_whole_rotation(fields)
    own = _parameters(fields, kind)
    theta = fields.number(THETA_FIELD[kind], least=1.001, most=1e12, default=DEFAULT_THETA[kind])
    return read_parameters(own, original=own, base=own, max_position=max_position, theta=theta)


def _parameters(fields: ConfigFields, kind: str) -> ConfigFields:
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
        scaling.defer("type", "must be spelled rope_type; transformers reads nothing else in a Gemma 3")
    return _untruncated(scaling)


def _untruncated(own: ConfigFields) -> ConfigFields:
    """transformers looks for `truncate` beside the sets, where it cannot stand."""
    if "truncate" in own.values and own.values["truncate"] is not True:
        own.defer("truncate", "must be true")
    return own


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=decoder_fields(
        *GEMMA_FIELDS,
        "rope_local_base_freq",
        "sliding_window_pattern",
        no_effect=("hidden_act", "_sliding_window_pattern"),
    ),
    read=_read,
)
