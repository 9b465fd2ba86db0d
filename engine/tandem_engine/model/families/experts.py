"""Families whose layers choose experts; gpt_oss has a module of its own.

Each is the reading of its differences from config.json:

    Qwen3-MoE     Qwen3 with experts. Layers in `mlp_only_layers` are dense, and of every `decoder_sparse_step` layers
                  only the last has experts
    Qwen2-MoE     the same of Qwen2, and a shared expert whose result the sigmoid of one more projection multiplies
    GLM-4-MoE     GLM-4.5 to 4.7: experts are chosen by sigmoid and a correction bias, from the best groups; a shared
                  expert; the first layers are dense; half of each head rotates. Layers beyond the last, which predict
                  several tokens, are not served
    ERNIE 4.5     experts are chosen by softmax and a correction bias; shared experts; neighboring pairs rotate
    Hunyuan       a shared expert of the size of the others
    MiniMax M2    experts are chosen by sigmoid and a correction bias; one norm for all heads of q, one for all of k
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, MoeConfig, QkNorm, Scoring, SharedExpert
from tandem_engine.model.config_fields import (
    FULL,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    SLIDING,
    ConfigFields,
    Defaults,
    expert_count,
    read_decoder,
    read_experts,
    read_scale,
)
from tandem_engine.model.families.dense import (
    ERNIE_VALUES,
    HUNYUAN_FIELDS,
    HUNYUAN_NO_EFFECT,
    HUNYUAN_VALUES,
    read_hunyuan,
)
from tandem_engine.model.families.windows import (
    in_all_layers,
    in_sliding_layers,
    read_layer_kinds,
    read_window,
    require_uniform_layers,
)
from tandem_engine.model.known_fields import BIASES, SILU, Family, biases, decoder_fields
from tandem_engine.model.rotary_fields import read_partial_decoder

DEFAULT_WINDOW = 4096


MIXTRAL_DEFAULTS = Defaults(num_kv_heads=8, rms_eps=1e-5, rope_theta=1_000_000.0)


def _read_mixtral(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MIXTRAL.name, defaults=MIXTRAL_DEFAULTS)
    window = read_window(fields, context=base.max_position, default=None)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=None)
    return replace(
        base,
        windows=in_all_layers(window, num_layers=base.num_layers),
        moe=read_experts(fields, count=expert_count(fields, "num_local_experts"), size="intermediate_size"),
    )


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    fields=decoder_fields(
        SILU,
        "sliding_window",
        "layer_types",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        no_effect=("max_window_layers",),
    ),
    read=_read_mixtral,
)


def _read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    # Unlike dense Qwen3, transformers derives the size of a head when the config is silent.
    base = read_decoder(fields, family=QWEN3_MOE.name, defaults=Defaults(num_kv_heads=4))
    return replace(
        base,
        qk_norm=QkNorm.HEADS,
        windows=_windows(fields, base),
        moe=read_sparse_experts(fields, base.num_layers, count=expert_count(fields, "num_experts")),
    )


def _windows(fields: ConfigFields, base: ModelConfig) -> tuple[int | None, ...]:
    """All layers or none."""
    slides = fields.flag("use_sliding_window", default=False)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=DEFAULT_WINDOW, slides=slides)
    if not slides:
        return ()
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    return in_all_layers(window, num_layers=base.num_layers)


def read_sparse_experts(
    fields: ConfigFields, num_layers: int, *, count: str = "num_experts", normalize: bool = False
) -> MoeConfig:
    """Experts of Qwen in all layers but those of `mlp_only_layers` and between those of `decoder_sparse_step`.

    `count`: the field with their number. `normalize`: what an absent `norm_topk_prob` means.
    """
    return replace(
        read_experts(fields, count=count, size="moe_intermediate_size"),
        normalize=fields.flag("norm_topk_prob", default=normalize),
        dense_layers=_dense_layers(fields, num_layers),
    )


def _dense_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    named = fields.items("mlp_only_layers")
    for layer in named:
        if type(layer) is not int or not 0 <= layer < num_layers:
            fields.refuse("mlp_only_layers", f"must name layers from 0 to {num_layers - 1}")
    step = fields.integer("decoder_sparse_step", least=1, most=MAX_LAYERS, default=1)
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=decoder_fields(
        SILU,
        BIASES,
        "use_sliding_window",
        "sliding_window",
        "layer_types",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
        "decoder_sparse_step",
        no_effect=("max_window_layers",),
    ),
    read=_read_qwen3_moe,
)


def _read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN2_MOE.name, defaults=Defaults(num_kv_heads=16))
    size = fields.integer("shared_expert_intermediate_size", least=1, most=MAX_INTERMEDIATE, default=5632)
    return replace(
        base,
        attention_bias=fields.flag("qkv_bias", default=True),
        windows=_qwen2_moe_windows(fields, base),
        moe=replace(
            read_sparse_experts(fields, base.num_layers),
            shared=SharedExpert(intermediate_size=size, gated=True),
        ),
    )


def _qwen2_moe_windows(fields: ConfigFields, base: ModelConfig) -> tuple[int | None, ...]:
    """Off unless `use_sliding_window`; then in the layers that `layer_types` names, or in every second of the first."""
    last = fields.integer("max_window_layers", least=0, most=1 << 20, default=28)
    slides = fields.flag("use_sliding_window", default=False)
    default = tuple(SLIDING if slides and layer % 2 == 0 and layer < last else FULL for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=default)
    if not slides and SLIDING in kinds:
        fields.refuse("layer_types", f"may name {SLIDING} only with use_sliding_window")
    return in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW)


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=decoder_fields(
        SILU,
        "qkv_bias",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
        "decoder_sparse_step",
    ),
    read=_read_qwen2_moe,
)


def _read_glm4_moe(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(num_kv_heads=8, rms_eps=1e-5)
    base = read_partial_decoder(fields, family=GLM4_MOE.name, defaults=defaults, factor=0.5)
    return replace(
        base,
        qk_norm=QkNorm.HEADS if fields.flag("use_qk_norm", default=False) else None,
        moe=_glm4_experts(fields, base.num_layers),
    )


def _glm4_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    experts = read_experts(fields, count="n_routed_experts", size="moe_intermediate_size")
    groups, kept = read_groups(fields, experts)
    shared = fields.integer("n_shared_experts", least=1, most=MAX_EXPERTS, default=1)
    dense = fields.integer("first_k_dense_replace", least=0, most=MAX_LAYERS, default=1)
    return replace(
        experts,
        normalize=fields.flag("norm_topk_prob", default=True),
        dense_layers=tuple(range(min(dense, num_layers))),
        scoring=Scoring.SIGMOID,
        choice_bias=True,
        groups=groups,
        kept_groups=kept,
        least_sum=1e-20,
        scale=read_scale(fields, "routed_scaling_factor"),
        float32_router=True,
        shared=SharedExpert(intermediate_size=shared * experts.intermediate_size),
    )


def read_groups(fields: ConfigFields, experts: MoeConfig) -> tuple[int, int]:
    """`n_group` and `topk_group`.

    Raises:
        CheckpointError: groups are not of equal size and of at least two experts, or hold too few experts.
    """
    groups = fields.integer("n_group", least=1, most=MAX_EXPERTS, default=1)
    kept = fields.integer("topk_group", least=1, most=MAX_EXPERTS, default=1)
    size, rest = divmod(experts.num_experts, groups)
    if rest or size < 2:
        fields.refuse("n_group", f"must divide the {experts.num_experts} experts into groups of at least 2")
    if kept > groups:
        fields.refuse("topk_group", f"must be at most n_group ({groups})")
    if kept * size < experts.experts_per_token:
        fields.refuse("topk_group", f"must leave at least num_experts_per_tok ({experts.experts_per_token}) experts")
    return groups, kept


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=decoder_fields(
        SILU,
        biases(default=False, output=False),
        "use_qk_norm",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        no_effect=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
    read=_read_glm4_moe,
)


def _read_ernie_moe(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(num_kv_heads=4, rms_eps=1e-5, rope_theta=5e5, tie_embeddings=True)
    base = read_decoder(fields, family=ERNIE_MOE.name, defaults=defaults)
    return replace(
        base,
        rope=replace(base.rope, interleaved=True),
        moe=_ernie_experts(fields, base.num_layers),
    )


def _ernie_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    experts = read_experts(fields, count="moe_num_experts", size="moe_intermediate_size", chosen_field="moe_k")
    shared = fields.integer("moe_num_shared_experts", least=0, most=MAX_EXPERTS, default=2)
    first = fields.integer("moe_layer_start_index", least=0, most=MAX_LAYERS, default=1)
    last = fields.integer("moe_layer_end_index", least=-1, most=MAX_LAYERS, default=-1)
    step = fields.integer("moe_layer_interval", least=1, most=MAX_LAYERS, default=1)
    final = num_layers - 1 if last == -1 else last
    sparse = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and first <= layer <= final]
    return replace(
        experts,
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        choice_bias=True,
        least_sum=fields.number("moe_norm_min", least=0, most=1, default=1e-12),
        float32_router=True,
        shared=SharedExpert(intermediate_size=shared * experts.intermediate_size) if shared else None,
    )


ERNIE_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    fields=decoder_fields(
        SILU,
        "moe_num_experts",
        "moe_k",
        "moe_intermediate_size",
        "moe_num_shared_experts",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_norm_min",
        no_effect=("moe_capacity", "num_nextn_predict_layers"),
        one_value={**ERNIE_VALUES, "moe_gate": ("topk", None), "moe_use_aux_free": (True, None)},
    ),
    read=_read_ernie_moe,
)


def _read_hunyuan_moe(fields: ConfigFields) -> ModelConfig:
    base = read_hunyuan(fields, family=HUNYUAN_MOE.name)
    for name in ("num_experts", "moe_topk"):
        values = fields.values.get(name)
        if isinstance(values, list):
            fields.defer(name, "must be one number for all layers")
    experts = read_experts(fields, count="num_experts", size="intermediate_size", chosen_field="moe_topk")
    shared = SharedExpert(intermediate_size=experts.intermediate_size)
    return replace(base, moe=replace(experts, float32_router=True, shared=shared))


HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    fields=decoder_fields(
        *HUNYUAN_FIELDS,
        "num_experts",
        "moe_topk",
        no_effect=(*HUNYUAN_NO_EFFECT, "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"),
        one_value={**HUNYUAN_VALUES, "use_mixed_mlp_moe": (True, None)},
    ),
    read=_read_hunyuan_moe,
)


def _read_minimax_m2(fields: ConfigFields) -> ModelConfig:
    defaults = Defaults(head_dim=128, num_kv_heads=8, rope_theta=5e6)
    head_dim = fields.integer("head_dim", least=4, most=MAX_HEAD_DIM, default=defaults.head_dim)
    factor = fields.integer("rotary_dim", least=2, most=head_dim, default=head_dim) / head_dim
    base = read_partial_decoder(fields, family=MINIMAX_M2.name, defaults=defaults, factor=factor)
    experts = read_experts(fields, count="num_local_experts", size="intermediate_size")
    return replace(
        base,
        qk_norm=QkNorm.WHOLE,
        moe=replace(experts, scoring=Scoring.SIGMOID, choice_bias=True),
    )


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields=decoder_fields(
        SILU,
        "num_local_experts",
        "num_experts_per_tok",
        "rotary_dim",
        no_effect=("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
        one_value={
            "qk_norm_type": ("per_layer", None),
            "scoring_func": ("sigmoid", None),
            "shared_intermediate_size": (0, None),
            "use_qk_norm": (True, None),
            "use_routing_bias": (True, None),
        },
    ),
    read=_read_minimax_m2,
)


EXPERT_FAMILIES = (QWEN3_MOE, QWEN2_MOE, GLM4_MOE, ERNIE_MOE, HUNYUAN_MOE, MINIMAX_M2)
