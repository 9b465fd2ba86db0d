"""Families with norms elsewhere than before each block; Gemma has a module of its own.

Each is the reading of its differences from config.json:

    OLMo 2, 3     after each block and none before; one norm for all heads of q, one for all of k. OLMo 3 has windows,
                  and scales the rotation of its full layers alone
    EXAONE 4      after each block; q and k normalized; full layers do not rotate where others have a window
    GLM-4         around each block; half of each head rotates, in neighboring pairs
    Cohere 2      LayerNorm; attention and feed-forward block read the same one; full layers do not rotate
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, NormKind, NormPlacement, QkNorm, RopeConfig
from tandem_engine.model.config_fields import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigFields,
    Defaults,
    read_decoder,
    read_positions,
    read_scale,
    read_sizes,
)
from tandem_engine.model.families.windows import in_sliding_layers, read_layer_kinds, stated_window
from tandem_engine.model.known_fields import BIASES, SILU, Family, biases, decoder_fields
from tandem_engine.model.rotary_fields import NO_ROTATION, read_partial_decoder, read_rope_set

DEFAULT_WINDOW = 4096


def full_layers(kinds: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)


def one_full_in(pattern: int, num_layers: int) -> tuple[str, ...]:
    """Kinds of layers of which every `pattern`-th is full, the others have a window."""
    return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))


def _as_olmo(base: ModelConfig) -> ModelConfig:
    return replace(
        base,
        norm=NormKind.ROUND_LAST,
        norm_placement=NormPlacement.AFTER,
        qk_norm=QkNorm.WHOLE,
    )


def _read_olmo2(fields: ConfigFields) -> ModelConfig:
    return _as_olmo(read_decoder(fields, family=OLMO2.name, defaults=Defaults(rms_eps=1e-5)))


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=decoder_fields(SILU, BIASES),
    read=_read_olmo2,
)

OLMO3_THETA = {FULL: 500_000.0, SLIDING: 500_000.0}


def _read_olmo3(fields: ConfigFields) -> ModelConfig:
    context = read_positions(fields)
    if fields.has("rope_theta") and fields.values["rope_theta"] != OLMO3_THETA[FULL]:
        fields.defer(
            "rope_theta", f"must be {OLMO3_THETA[FULL]:g}; transformers gives another one to full layers alone"
        )
    full, sliding = (_olmo3_rope(fields, kind, max_position=context) for kind in (FULL, SLIDING))
    base = read_sizes(fields, family=OLMO3.name, defaults=Defaults(rms_eps=1e-5), rope=full, context=context)
    kinds = read_layer_kinds(fields, default=one_full_in(4, base.num_layers))
    return replace(
        _as_olmo(base),
        windows=in_sliding_layers(fields, kinds, context=context, default=DEFAULT_WINDOW),
        second_rope=sliding,
        second_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
    )


def _olmo3_rope(fields: ConfigFields, kind: str, *, max_position: int) -> RopeConfig:
    return read_rope_set(fields, kind, max_position=max_position, theta_field=None, thetas=OLMO3_THETA)


OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    fields=decoder_fields(SILU, BIASES, "sliding_window", "layer_types"),
    read=_read_olmo3,
)


def _read_glm4(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(head_dim=128, num_kv_heads=2, rms_eps=1.5625e-7)
    base = read_partial_decoder(fields, family=GLM4.name, defaults=defaults, factor=0.5)
    return replace(
        base,
        rope=replace(base.rope, interleaved=True),
        norm_placement=NormPlacement.AROUND,
    )


GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    fields=decoder_fields(SILU, biases(default=True, output=False)),
    read=_read_glm4,
)


def _read_cohere2(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(tie_embeddings=True, eps_field="layer_norm_eps", rms_eps=1e-5)
    base = read_decoder(fields, family=COHERE2.name, defaults=defaults)
    if base.head_dim * base.num_heads != base.hidden_size:
        fields.defer("head_dim", f"must be hidden_size / num_attention_heads, {base.hidden_size / base.num_heads:g}")
    pattern = fields.integer("sliding_window_pattern", least=1, most=MAX_LAYERS, default=4)
    kinds = read_layer_kinds(fields, default=one_full_in(pattern, base.num_layers))
    return replace(
        base,
        rope=replace(base.rope, interleaved=True),
        norm=NormKind.CENTERED,
        norm_placement=NormPlacement.SHARED,
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW),
        second_rope=NO_ROTATION if FULL in kinds else None,
        second_layers=full_layers(kinds),
        logit_scale=read_scale(fields, "logit_scale", default=0.0625),
    )


COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    fields=decoder_fields(
        SILU,
        BIASES,
        "layer_norm_eps",
        "logit_scale",
        "sliding_window",
        "sliding_window_pattern",
        "layer_types",
        no_effect=(
            "_sliding_window_pattern",
            "layer_switch",
            "use_embedding_sharing",
            "use_parallel_embedding",
        ),
        one_value={
            "order_of_interleaved_layers": ("local_attn_first", None),
            "position_embedding_type": ("rope_gptj", None),
            "rotary_pct": (1.0, 1, None),
            "use_gated_activation": (True, None),
            "use_parallel_block": (True, None),
            "use_qk_norm": (False, None),
        },
    ),
    read=_read_cohere2,
)


def _read_exaone4(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(num_kv_heads=32, rms_eps=1e-5)
    base = read_decoder(fields, family=EXAONE4.name, defaults=defaults)
    window = stated_window(fields, default=DEFAULT_WINDOW)
    kinds = read_layer_kinds(fields, default=_exaone4_kinds(fields, base.num_layers, has_window=window is not None))
    still = full_layers(kinds) if window is not None else ()
    return replace(
        base,
        norm_placement=NormPlacement.AFTER,
        qk_norm=QkNorm.HEADS,
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW),
        second_rope=NO_ROTATION if still else None,
        second_layers=still,
    )


def _exaone4_kinds(fields: ConfigFields, num_layers: int, *, has_window: bool) -> tuple[str, ...]:
    """Where `layer_types` is absent. Next to it `sliding_window_pattern` may be a text, such as LLLG."""
    if fields.has("layer_types") or not has_window:
        return (FULL,) * num_layers
    return one_full_in(fields.integer("sliding_window_pattern", least=1, most=MAX_LAYERS, default=4), num_layers)


EXAONE4 = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    fields=decoder_fields(SILU, "sliding_window", "sliding_window_pattern", "layer_types"),
    read=_read_exaone4,
)


NORM_FAMILIES = (OLMO2, OLMO3, EXAONE4, GLM4, COHERE2)
