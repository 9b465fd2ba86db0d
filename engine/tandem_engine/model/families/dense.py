"""Families with an ordinary feed-forward block in each layer, and norms where Llama has them.

Each is the reading of its differences from config.json:

    Phi-3         q, k, v and gate, up are stored as one matrix each; `longrope`; also Phi-4 and Phi-4-mini
    Granite       factors of embeddings, scores, what blocks add, and logits
    SmolLM3       every fourth layer does not rotate
    Seed-OSS      biases on q, k, v
    ERNIE 4.5     neighboring pairs rotate
    Hunyuan       q and k are normalized after their rotation, whose base is stretched by `alpha`
    Ministral 3   queries grow with their position
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, QkNorm, QueryScale, RopeConfig
from tandem_engine.model.config_fields import (
    FULL,
    MAX_POSITION,
    ORIGINAL,
    SLIDING,
    ConfigFields,
    Defaults,
    longest_context,
    read_decoder,
    read_parameters,
    read_positions,
    read_scale,
    read_sizes,
    require_whole_rotation,
    rotary_fields,
)
from tandem_engine.model.families.windows import (
    in_all_layers,
    in_sliding_layers,
    read_layer_kinds,
    read_window,
    stated_window,
)
from tandem_engine.model.known_fields import BIASES, MLP_BIAS, SILU, Family, biases, decoder_fields
from tandem_engine.model.long_context import LONGROPE
from tandem_engine.model.rotary_fields import (
    NO_ROTATION,
    layers_without_rotation,
    read_longrope,
    with_rotary_dim,
)


def _read_phi3(fields: ConfigFields) -> ModelConfig:
    context = read_positions(fields)
    inner = rotary_fields(fields)
    kind = inner.values.get("rope_type", inner.values.get("type", "default"))
    if kind not in ("default", LONGROPE):
        inner.defer("rope_type", f"must be default or {LONGROPE} in a model of this family")
    base = inner if inner.has("rope_theta") else fields
    rope = RopeConfig(theta=base.number("rope_theta", least=1.001, most=1e12, default=10_000.0))
    sizes = read_sizes(fields, family=PHI3.name, defaults=Defaults(rms_eps=1e-5), rope=rope, context=context)
    rope = with_rotary_dim(fields, rope, head_dim=sizes.head_dim, factor=1.0)
    if kind == LONGROPE:
        width = rope.rotary_dim or sizes.head_dim
        rope = read_longrope(fields, rope, head_dim=width, max_position=context)
    else:
        _require_plain_rotation(inner)
    window = read_window(fields, context=context, default=None)
    return replace(
        sizes,
        rope=rope,
        windows=in_all_layers(window, num_layers=sizes.num_layers),
    )


PHI3_ROTATION = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _require_plain_rotation(inner: ConfigFields) -> None:
    for name, value in inner.values.items():
        if name not in PHI3_ROTATION and value is not None:
            inner.defer(name, "is no rotary parameter that is known")


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    fields=decoder_fields(
        SILU,
        "sliding_window",
        one_value={
            "full_attn_mod": (1, None),
            "interpolate_factor": (1, None),
            "lm_head_bias": (False, None),
        },
    ),
    read=_read_phi3,
)


def _read_granite(fields: ConfigFields) -> ModelConfig:
    return replace(
        read_decoder(fields, family=GRANITE.name, defaults=Defaults()),
        attention_scale=read_scale(fields, "attention_multiplier"),
        embedding_scale=read_scale(fields, "embedding_multiplier"),
        residual_scale=read_scale(fields, "residual_multiplier"),
        logit_scale=1 / read_scale(fields, "logits_scaling"),
    )


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    fields=decoder_fields(
        SILU,
        BIASES,
        MLP_BIAS,
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ),
    read=_read_granite,
)


def _read_smollm3(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(num_kv_heads=4, rope_theta=2e6, tie_embeddings=True)
    base = read_decoder(fields, family=SMOLLM3.name, defaults=defaults)
    still = layers_without_rotation(fields, base.num_layers)
    slides = fields.flag("use_sliding_window", default=False) and stated_window(fields, default=None) is not None
    default = tuple(SLIDING if slides and layer in still else FULL for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=default)
    if not slides and SLIDING in kinds:
        fields.refuse("layer_types", f"may name {SLIDING} only with use_sliding_window and a sliding_window")
    return replace(
        base,
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=None),
        second_rope=NO_ROTATION if still else None,
        second_layers=still,
    )


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=decoder_fields(
        SILU,
        BIASES,
        MLP_BIAS,
        "no_rope_layers",
        "no_rope_layer_interval",
        "use_sliding_window",
        "sliding_window",
        "layer_types",
        no_effect=("max_window_layers",),
    ),
    read=_read_smollm3,
)


QKV_BIAS = biases(default=True, output=False)


def _read_seed_oss(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(head_dim=128, null_head_dim=True, num_kv_heads=8)
    return replace(
        read_decoder(fields, family=SEED_OSS.name, defaults=defaults),
        output_bias=fields.flag("attention_out_bias", default=False),
    )


SEED_OSS = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    fields=decoder_fields(SILU, QKV_BIAS, "attention_out_bias", MLP_BIAS, no_effect=("residual_dropout",)),
    read=_read_seed_oss,
)


def _read_ernie(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(
        head_dim=128, null_head_dim=True, num_kv_heads=2, rms_eps=1e-5, rope_theta=5e5, tie_embeddings=True
    )
    base = read_decoder(fields, family=ERNIE.name, defaults=defaults)
    return replace(base, rope=replace(base.rope, interleaved=True))


ERNIE_VALUES: dict[str, tuple[object, ...]] = {
    "compression_ratio": (1.0, 1, None),
    "use_bias": (False, None),
    "use_rmsnorm": (True, None),
}

ERNIE = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields=decoder_fields(SILU, one_value=ERNIE_VALUES),
    read=_read_ernie,
)


def read_hunyuan(fields: ConfigFields, *, family: str) -> ModelConfig:
    """What Hunyuan models with and without experts have in common."""
    context = read_positions(fields)
    rope = _hunyuan_rope(fields, max_position=context)
    base = read_sizes(
        fields,
        family=family,
        defaults=Defaults(rms_eps=1e-5),
        rope=rope,
        context=longest_context(rope, max_position=context),
    )
    alpha = rotary_fields(fields)
    if alpha.has("alpha"):
        stretch = alpha.number("alpha", least=1e-3, most=1e9) ** (base.head_dim / (base.head_dim - 2))
        base = replace(base, rope=replace(rope, theta=rope.theta * stretch))
    return replace(
        base,
        qk_norm=QkNorm.ROTATED_HEADS,
    )


HUNYUAN_ROTATION = (
    "alpha",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "rope_theta",
    "rope_type",
    "type",
)


def _hunyuan_rope(fields: ConfigFields, *, max_position: int) -> RopeConfig:
    """With `alpha` the kind is called dynamic, but only the base differs from a plain rotation."""
    require_whole_rotation(fields)
    inner = rotary_fields(fields)
    require_whole_rotation(inner)
    base = inner if inner.has("rope_theta") else fields
    if not inner.has("alpha"):
        original = fields if fields.has(ORIGINAL) else inner
        return read_parameters(inner, original=original, base=base, max_position=max_position, theta=10_000.0)
    kind = "rope_type" if inner.has("rope_type") else "type"
    if inner.values.get(kind) != "dynamic":
        inner.defer(kind, "must be dynamic next to alpha")
    for name, value in inner.values.items():
        if name not in HUNYUAN_ROTATION and value is not None:
            inner.defer(name, "is no rotary parameter that is known")
    return RopeConfig(theta=base.number("rope_theta", least=1.001, most=1e12, default=10_000.0))


HUNYUAN_FIELDS = (SILU, BIASES)
HUNYUAN_NO_EFFECT = (
    "attention_head_dim",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "skip_cls_token",
    "text_end_id",
    "text_start_id",
)
HUNYUAN_VALUES: dict[str, tuple[object, ...]] = {
    "add_classification_head": (False, None),
    "cla_share_factor": (1, 2, None),
    "norm_type": ("rms", "hf_rms", None),
    "use_cla": (False, None),
    "use_mla": (False, None),
    "use_qk_norm": (True, None),
    "use_rotary_pos_emb": (True, None),
}


def _read_hunyuan_dense(fields: ConfigFields) -> ModelConfig:
    return read_hunyuan(fields, family=HUNYUAN.name)


HUNYUAN = Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    fields=decoder_fields(*HUNYUAN_FIELDS, no_effect=HUNYUAN_NO_EFFECT, one_value=HUNYUAN_VALUES),
    read=_read_hunyuan_dense,
)


def _read_ministral3(fields: ConfigFields) -> ModelConfig:
    context = read_positions(fields)
    require_whole_rotation(fields)
    inner = rotary_fields(fields)
    require_whole_rotation(inner)
    if not inner.values:
        fields.defer("rope_parameters", "must be given in a model of this family")
    if fields.has(ORIGINAL):
        fields.defer(ORIGINAL, "must stand in rope_parameters")
    own = replace(inner, values={name: value for name, value in inner.values.items() if name not in MINISTRAL_ROTATION})
    base = own if own.has("rope_theta") else fields
    rope = read_parameters(own, original=own, base=base, max_position=context, theta=10_000.0)
    defaults = Defaults(head_dim=128, null_head_dim=True, num_kv_heads=8, rms_eps=1e-5)
    sizes = read_sizes(
        fields,
        family=MINISTRAL3.name,
        defaults=defaults,
        rope=rope,
        context=longest_context(rope, max_position=context),
    )
    window = read_window(fields, context=sizes.max_position, default=None)
    return replace(
        sizes,
        windows=in_all_layers(window, num_layers=sizes.num_layers),
        query_scale=QueryScale(
            beta=inner.number("llama_4_scaling_beta", least=0, most=1e3),
            period=inner.integer(ORIGINAL, least=1, most=MAX_POSITION),
        ),
    )


MINISTRAL_ROTATION = ("llama_4_scaling_beta", "max_position_embeddings")

MINISTRAL3 = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    fields=decoder_fields(SILU, "sliding_window"),
    read=_read_ministral3,
)


DENSE_FAMILIES = (
    PHI3,
    GRANITE,
    SMOLLM3,
    SEED_OSS,
    ERNIE,
    HUNYUAN,
    MINISTRAL3,
)
