"""Gemma 3, text only: q and k are normalised, five layers with a window to each one without.

Layers with a window rotate by a base of their own. config.json has both sets of rotary parameters under
`rope_parameters`, or, as published, `rope_theta` and `rope_scaling` for the full layers and
`rope_local_base_freq` for the others.
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import MAX_LAYERS, read_decoder
from tandem_engine.model.families.gemma import as_gemma
from tandem_engine.model.family import Family
from tandem_engine.model.rope_fields import MAX_THETA, has_rope_of, read_rope
from tandem_engine.model.windows import FULL, SLIDING, in_sliding_layers, read_layer_kinds, read_window

DEFAULT_HEAD_DIM = 256
DEFAULT_WINDOW = 4096
DEFAULT_PATTERN = 6
DEFAULT_THETA, DEFAULT_LOCAL_THETA = 1_000_000.0, 10_000.0
MAX_CAP = 1e6


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(
        fields,
        family=GEMMA3.name,
        head_dim=DEFAULT_HEAD_DIM,
        tie_embeddings=True,
        rope_theta=DEFAULT_THETA,
        rope_of=FULL,
    )
    if fields.has("attn_logit_softcapping"):
        fields.refuse("attn_logit_softcapping", "must be null; Gemma 3 does not cap attention scores")
    kinds = _layer_kinds(fields, base.num_layers)
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    return replace(
        as_gemma(fields, base),
        qk_norm=True,
        windows=in_sliding_layers(window, kinds),
        local_rope=_local_rope(fields, base),
        local_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", least=1e-3, most=MAX_CAP, default=None),
    )


def _layer_kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Published checkpoints give the pattern as a number, or leave it at six."""
    pattern = fields.integer("sliding_window_pattern", least=1, most=MAX_LAYERS, default=DEFAULT_PATTERN)
    default = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    return read_layer_kinds(fields, default=default)


def _local_rope(fields: ConfigFields, base: ModelConfig) -> RopeConfig:
    if has_rope_of(fields, SLIDING):
        return read_rope(fields, max_position=base.max_position, theta=DEFAULT_LOCAL_THETA, layer_kind=SLIDING)
    theta = fields.number("rope_local_base_freq", least=1.001, most=MAX_THETA, default=DEFAULT_LOCAL_THETA)
    return RopeConfig(theta=theta)


GEMMA3 = Family(name="gemma3_text", architecture="Gemma3ForCausalLM", read=_read)
