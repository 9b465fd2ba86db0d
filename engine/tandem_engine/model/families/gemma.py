"""Gemma 2 and 3.

Norms scale by 1 + weight, one before and one after attention and the feed-forward block; embeddings times √hidden_size,
and tied to the output head unless config.json states otherwise; scores divided by √query_pre_attn_scalar instead of
√head_dim; GELU by its tanh approximation. Each adds its windows, caps and rotations.

Gemma 3 is its text only: q and k are normalized, five layers with a window to each one without. Layers with a window
rotate by another base: config.json has both sets of rotary parameters under `rope_parameters`, or, as published,
`rope_theta` and `rope_scaling` for the full layers and `rope_local_base_freq` for the others. Its
`max_position_embeddings` is the context after scaling.
"""

import math
from dataclasses import replace

from tandem_engine.config import Activation, ModelConfig, NormKind, NormPlacement, QkNorm, RopeConfig
from tandem_engine.model.config_fields import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigFields,
    Defaults,
    read_decoder,
    read_positions,
    read_sizes,
)
from tandem_engine.model.families.windows import in_sliding_layers, read_layer_kinds
from tandem_engine.model.known_fields import BIASES, Family, decoder_fields
from tandem_engine.model.rotary_fields import read_rope_set

GEMMA_FIELDS = (
    BIASES,
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
    "use_bidirectional_attention",
)
DEFAULT_QUERY_SCALAR = 256.0
MAX_QUERY_SCALAR = 1e6


def as_gemma(fields: ConfigFields, base: ModelConfig) -> ModelConfig:
    """`base` with Gemma's ways. Raises `CheckpointError` for variants that are no causal model of this kind."""
    if fields.has("hidden_activation") and fields.values["hidden_activation"] != "gelu_pytorch_tanh":
        fields.defer("hidden_activation", "must be gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", default=False):
        fields.refuse("use_bidirectional_attention", "must be false; tokens of a generating model see no later ones")
    scalar = fields.number("query_pre_attn_scalar", least=1e-3, most=MAX_QUERY_SCALAR, default=DEFAULT_QUERY_SCALAR)
    return replace(
        base,
        attention_scale=1 / math.sqrt(scalar),
        embedding_scale=math.sqrt(base.hidden_size),
        activation=Activation.GELU_TANH,
        norm=NormKind.UNIT_OFFSET,
        norm_placement=NormPlacement.AROUND,
    )


GEMMA2_DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, tie_embeddings=True)
DEFAULT_WINDOW = 4096
DEFAULT_ATTENTION_CAP = 50.0
DEFAULT_LOGIT_CAP = 30.0
MAX_CAP = 1e6


def _read_gemma2(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=GEMMA2.name, defaults=GEMMA2_DEFAULTS)
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=alternating)
    return replace(
        as_gemma(fields, base),
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW),
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", default=DEFAULT_ATTENTION_CAP),
        logit_soft_cap=_cap(fields, "final_logit_softcapping", default=DEFAULT_LOGIT_CAP),
    )


def _cap(fields: ConfigFields, name: str, *, default: float) -> float | None:
    return fields.optional_number(name, least=1e-3, most=MAX_CAP, default=default)


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=decoder_fields(*GEMMA_FIELDS, no_effect=("hidden_act",)),
    read=_read_gemma2,
)


DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, tie_embeddings=True)
DEFAULT_PATTERN = 6
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
THETA_FIELD = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    context = read_positions(fields)
    rope = _rope_of(fields, FULL, max_position=context)
    base = read_sizes(fields, family=GEMMA3.name, defaults=DEFAULTS, rope=rope, context=context)
    if fields.has("attn_logit_softcapping"):
        fields.defer("attn_logit_softcapping", "must be null; Gemma 3 does not cap attention scores")
    kinds = _layer_kinds(fields, base.num_layers)
    return replace(
        as_gemma(fields, base),
        qk_norm=QkNorm.HEADS,
        windows=in_sliding_layers(fields, kinds, context=context, default=DEFAULT_WINDOW),
        second_rope=_rope_of(fields, SLIDING, max_position=context),
        second_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
        logit_soft_cap=fields.optional_number("final_logit_softcapping", least=1e-3, most=MAX_CAP, default=None),
    )


def _rope_of(fields: ConfigFields, kind: str, *, max_position: int) -> RopeConfig:
    return read_rope_set(fields, kind, max_position=max_position, theta_field=THETA_FIELD[kind], thetas=DEFAULT_THETA)


def _layer_kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Published checkpoints give the pattern as a number, or leave it at six."""
    pattern = fields.integer("sliding_window_pattern", least=1, most=MAX_LAYERS, default=DEFAULT_PATTERN)
    default = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    return read_layer_kinds(fields, default=default)


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=decoder_fields(
        *GEMMA_FIELDS,
        "rope_local_base_freq",
        "sliding_window_pattern",
        no_effect=("hidden_act", "_sliding_window_pattern"),
    ),
    read=_read_gemma3,
)
