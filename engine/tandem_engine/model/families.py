"""The table of model families: how each one's config.json becomes a `ModelConfig`.

All supported families are the same decoder (`model.decoder`): blocks of grouped-query attention with rotary positions
and a gated feed-forward part, each after a norm. A family is the reading of its differences from config.json.

    Gemma 2 and 3   norms scale by 1 + weight, one before and one after attention and the feed-forward block; embeddings
                    times √hidden_size, and tied to the output head unless config.json states otherwise; scores divided
                    by √query_pre_attn_scalar instead of √head_dim; GELU by its tanh approximation. Each adds its
                    windows, caps and rotations
    Gemma 3         text only: q and k are normalized, five layers with a window to each one without. Layers with a
                    window rotate by another base: config.json has both sets of rotary parameters under
                    `rope_parameters`, or, as published, `rope_theta` and `rope_scaling` for the full layers and
                    `rope_local_base_freq` for the others. Its `max_position_embeddings` is the context after scaling
    gpt_oss         see `gpt_oss`

Others are in `dense_families`, `norm_families` and `expert_families`.
"""

import math
from dataclasses import replace

from tandem_engine.config import Activation, ModelConfig, NormKind, NormPlacement, QkNorm, RopeConfig
from tandem_engine.model import gpt_oss
from tandem_engine.model.config_fields import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigFields,
    Defaults,
    Windows,
    expert_count,
    in_all_layers,
    in_sliding_layers,
    read_decoder,
    read_experts,
    read_layer_kinds,
    read_positions,
    read_sizes,
    read_window,
    require_silu,
    require_uniform_layers,
    stated_window,
)
from tandem_engine.model.dense_families import DENSE_FAMILIES
from tandem_engine.model.expert_families import EXPERT_FAMILIES
from tandem_engine.model.known_fields import Family, decoder_fields
from tandem_engine.model.latent.families import LATENT_FAMILIES
from tandem_engine.model.norm_families import NORM_FAMILIES
from tandem_engine.model.rotary_fields import read_rope_set

GEMMA_FIELDS = (
    "attention_bias",
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
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        base,
        attention_bias=attention_bias,
        output_bias=attention_bias,
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


def _read_llama(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_decoder(fields, family=LLAMA.name, defaults=Defaults()),
        activation=require_silu(fields),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fields=decoder_fields("hidden_act", "attention_bias", "mlp_bias", no_effect=("max_window_layers",)),
    read=_read_llama,
)


def _read_mistral(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MISTRAL.name, defaults=Defaults(num_kv_heads=8))
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=DEFAULT_WINDOW)
    return replace(
        base,
        activation=require_silu(fields),
        windows=in_all_layers(window, num_layers=base.num_layers),
    )


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    fields=decoder_fields("hidden_act", "sliding_window", "layer_types", no_effect=("max_window_layers",)),
    read=_read_mistral,
)


MIXTRAL_DEFAULTS = Defaults(num_kv_heads=8, rms_eps=1e-5, rope_theta=1_000_000.0)


def _read_mixtral(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MIXTRAL.name, defaults=MIXTRAL_DEFAULTS)
    window = read_window(fields, context=base.max_position, default=None)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=None)
    return replace(
        base,
        activation=require_silu(fields),
        windows=in_all_layers(window, num_layers=base.num_layers),
        moe=read_experts(fields, count=expert_count(fields, "num_local_experts"), size="intermediate_size"),
    )


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    fields=decoder_fields(
        "hidden_act",
        "sliding_window",
        "layer_types",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        no_effect=("max_window_layers",),
    ),
    read=_read_mixtral,
)


def qwen_windows(fields: ConfigFields, *, num_layers: int, context: int) -> Windows:
    """Off unless `use_sliding_window`; then in the layers that `layer_types` names, or from `max_window_layers` on."""
    first = fields.integer("max_window_layers", least=0, most=1 << 20, default=28)
    slides = fields.flag("use_sliding_window", default=False) and stated_window(fields, default=4096) is not None
    default = tuple(SLIDING if slides and layer >= first else FULL for layer in range(num_layers))
    kinds = read_layer_kinds(fields, default=default)
    if not slides and SLIDING in kinds:
        fields.refuse("layer_types", f"may name {SLIDING} only with use_sliding_window and a sliding_window")
    return in_sliding_layers(fields, kinds, context=context, default=4096)


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN2.name, defaults=Defaults(num_kv_heads=32))
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=True,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=decoder_fields("hidden_act", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    read=_read_qwen2,
)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN3.name, defaults=Defaults(head_dim=128, num_kv_heads=32))
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        base,
        activation=require_silu(fields),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QkNorm.HEADS,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=decoder_fields(
        "hidden_act", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "attention_bias"
    ),
    read=_read_qwen3,
)


GPT_OSS = Family(name=gpt_oss.NAME, architecture=gpt_oss.ARCHITECTURE, fields=gpt_oss.FIELDS, read=gpt_oss.read_gpt_oss)


FAMILIES = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GPT_OSS),
    *EXPERT_FAMILIES,
    *NORM_FAMILIES,
    *DENSE_FAMILIES,
    *LATENT_FAMILIES,
)


def find_family(config: ConfigFields) -> Family | None:
    """The family that `architectures` names. `auto_map`, which points at code to run, is never looked at.

    Raises:
        CheckpointError: `model_type`, by which transformers chooses a model, names another one.
    """
    architectures = config.items("architectures")
    named = [family for family in FAMILIES if family.architecture in architectures]
    if not named:
        return None
    model_type = config.values.get("model_type")
    family = next((each for each in named if model_type in (None, each.name, *each.other_names)), None)
    if family is None:
        config.refuse(
            "model_type",
            f"must be {named[0].name}, as architectures names {named[0].architecture}; correct the one that is wrong",
        )
    return family


def require_family(config: ConfigFields) -> Family:
    """As `find_family`. Raises `CheckpointError` when there is none."""
    family = find_family(config)
    if family is None:
        supported = ", ".join(family.architecture for family in FAMILIES)
        config.refuse("architectures", f"must name a supported architecture ({supported})")
    return family
