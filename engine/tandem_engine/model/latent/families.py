"""deepseek_v2, deepseek_v3 (R1, V3.1, Kimi K2) and glm4_moe_lite: their config.json.

Differences to a plain decoder:

    attention   one latent per token in place of keys and values (`latent.attention`); YaRN's temperature multiplies the
                scores where `mscale_all_dim` is set; neighboring dimensions rotate together
    experts     in groups, of which the best are kept; their weights times `routed_scaling_factor`; a block besides
                that every token takes; the first layers are dense
    V2          softmax; a group is worth its best expert; weights are never scaled to sum to 1
    V3, GLM     sigmoid; experts are chosen by score and a stored bias; a group is worth its two best experts
    MTP         layers behind the last one guess further tokens; they are left out (`tensor_aliases`)
"""

from dataclasses import replace

from tandem_engine.config import LatentConfig, ModelConfig, MoeConfig, Scoring, SharedExpert
from tandem_engine.model.config_fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    read_decoder,
    read_experts,
    read_scale,
)
from tandem_engine.model.known_fields import BIASES, SILU, Family, decoder_fields

V2, V3, GLM = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
KIMI = "kimi_k2"
"""A `model_type` that means deepseek_v3."""

FIELDS = (
    BIASES,
    SILU,
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "routed_scaling_factor",
    "topk_group",
    "v_head_dim",
)
NO_EFFECT = ("aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim", "seq_aux")
"""Training, and the number of layers for MTP. The size of a query head follows from its parts."""
V3_VALUES = {"moe_layer_freq": (1, None), "scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
V2_VALUES = {"moe_layer_freq": (1, None), "scoring_func": ("softmax", None), "norm_topk_prob": (False, None)}

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"
DENSE, SPARSE = "dense", "sparse"


def _read_deepseek_v2(fields: ConfigFields) -> ModelConfig:
    base = _read_latent(fields, family=V2, defaults=Defaults(), interleaved=True)
    groups = kept = 1
    if fields.choice("topk_method", (GREEDY, GROUP_LIMITED), default=GREEDY) == GROUP_LIMITED:
        groups, kept = _groups(fields, default_groups=None, default_kept=None)
    moe = _experts(fields, groups=groups, kept=kept, group_top=1, shared=2, scale=1.0)
    dense = _first_dense(fields, base.num_layers, default=0)
    return replace(base, moe=replace(moe, normalize=False, dense_layers=dense))


def _read_deepseek_v3(fields: ConfigFields) -> ModelConfig:
    interleaved = fields.flag("rope_interleave", default=True)
    base = _read_latent(fields, family=V3, defaults=Defaults(), interleaved=interleaved)
    moe = _scored_experts(fields, groups=8, kept=4, scale=2.5)
    return replace(base, moe=replace(moe, dense_layers=_first_dense(fields, base.num_layers, default=3)))


def _read_glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    interleaved = fields.flag("rope_interleave", default=True)
    base = _read_latent(fields, family=GLM, defaults=Defaults(rms_eps=1e-5), interleaved=interleaved)
    moe = _scored_experts(fields, groups=1, kept=1, scale=1.8)
    return replace(base, moe=replace(moe, dense_layers=_dense_layers(fields, base.num_layers)))


def _read_latent(fields: ConfigFields, *, family: str, defaults: Defaults, interleaved: bool) -> ModelConfig:
    """All but the experts."""
    latent = _latent(fields, interleaved=interleaved)
    _require_own_heads(fields, latent)
    # As read_decoder would have it: `head_dim` is what rotates.
    plain = replace(fields, values=fields.values | {"head_dim": latent.rotated_size})
    base = read_decoder(plain, family=family, defaults=defaults)
    return replace(
        base,
        num_kv_heads=1,
        head_dim=latent.width,
        latent=latent,
        attention_scale=latent.query_size**-0.5 * _temperature(fields, base) ** 2,
    )


def _latent(fields: ConfigFields, *, interleaved: bool) -> LatentConfig:
    rotated = fields.integer("qk_rope_head_dim", least=4, most=MAX_HEAD_DIM // 2, default=64)
    if rotated % 2:
        fields.refuse("qk_rope_head_dim", "must be even: dimensions rotate in pairs")
    return LatentConfig(
        query_rank=fields.optional_integer("q_lora_rank", least=1, most=MAX_HIDDEN, default=1536),
        rank=fields.integer("kv_lora_rank", least=1, most=MAX_HEAD_DIM - rotated, default=512),
        plain_size=fields.integer("qk_nope_head_dim", least=1, most=MAX_HEAD_DIM, default=128),
        rotated_size=rotated,
        value_size=fields.integer("v_head_dim", least=1, most=MAX_HEAD_DIM, default=128),
        interleaved=interleaved,
    )


def _require_own_heads(fields: ConfigFields, latent: LatentConfig) -> None:
    """Every query head has keys and values of its own, and what rotates of them is `head_dim`."""
    heads = fields.integer("num_attention_heads", least=1, most=MAX_HEADS)
    if fields.has("num_key_value_heads") and fields.values["num_key_value_heads"] != heads:
        fields.refuse("num_key_value_heads", f"must be num_attention_heads ({heads}): each head has its own")
    if fields.has("head_dim") and fields.values["head_dim"] != latent.rotated_size:
        fields.refuse("head_dim", f"must be qk_rope_head_dim ({latent.rotated_size}) where a file has both")


def _temperature(fields: ConfigFields, base: ModelConfig) -> float:
    """Factor of queries and of keys."""
    sets = fields.inner("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    if sets.has("mscale_all_dim") and base.rope.rope_type not in ("default", "yarn"):
        sets.defer("mscale_all_dim", "must be absent, unless rope_type is yarn")
    return base.rope.yarn_mscale(base.rope.mscale_all_dim) if base.rope.mscale_all_dim else 1.0


def _scored_experts(fields: ConfigFields, *, groups: int, kept: int, scale: float) -> MoeConfig:
    """Of V3 and GLM, with their defaults."""
    count, best = _groups(fields, default_groups=groups, default_kept=kept)
    moe = _experts(fields, groups=count, kept=best, group_top=2, shared=1, scale=scale)
    normalize = fields.flag("norm_topk_prob", default=True)
    return replace(moe, scoring=Scoring.SIGMOID, choice_bias=True, normalize=normalize, least_sum=1e-20)


def _experts(fields: ConfigFields, *, groups: int, kept: int, group_top: int, shared: int, scale: float) -> MoeConfig:
    """`shared` and `scale` by default. Raises `CheckpointError` where groups and experts do not fit each other."""
    moe = read_experts(fields, count="n_routed_experts", size="moe_intermediate_size")
    per_group, rest = divmod(moe.num_experts, groups)
    if rest:
        fields.refuse("n_group", f"must divide n_routed_experts ({moe.num_experts})")
    if per_group < group_top:
        fields.refuse("n_group", f"must leave {group_top} of {moe.num_experts} experts to each group")
    if per_group * kept < moe.experts_per_token:
        fields.refuse(
            "topk_group",
            f"must keep num_experts_per_tok ({moe.experts_per_token}) experts, and keeps {per_group} per group",
        )
    blocks = fields.integer("n_shared_experts", least=1, most=MAX_INTERMEDIATE // moe.intermediate_size, default=shared)
    return replace(
        moe,
        groups=groups,
        kept_groups=kept,
        group_top=group_top,
        scale=read_scale(fields, "routed_scaling_factor", default=scale),
        float32_router=True,
        shared=SharedExpert(intermediate_size=blocks * moe.intermediate_size),
    )


def _groups(fields: ConfigFields, *, default_groups: int | None, default_kept: int | None) -> tuple[int, int]:
    """Groups of experts, and how many of them are kept."""
    groups = fields.integer("n_group", least=1, most=MAX_INTERMEDIATE, default=default_groups)
    kept = fields.integer("topk_group", least=1, most=MAX_INTERMEDIATE, default=default_kept)
    if kept > groups:
        fields.refuse("topk_group", f"must be at most n_group ({groups})")
    return groups, kept


def _first_dense(fields: ConfigFields, num_layers: int, *, default: int) -> tuple[int, ...]:
    first = fields.integer("first_k_dense_replace", least=0, most=MAX_LAYERS, default=default)
    return tuple(range(min(first, num_layers)))


def _dense_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """`mlp_layer_types`; without it the first one. Published files have `first_k_dense_replace` as well."""
    kinds = fields.items("mlp_layer_types") or [DENSE, *[SPARSE] * (num_layers - 1)]
    if len(kinds) != num_layers or not all(kind in (DENSE, SPARSE) for kind in kinds):
        fields.refuse("mlp_layer_types", f"must name {DENSE} or {SPARSE} for each of the {num_layers} layers")
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == DENSE)
    if fields.has("first_k_dense_replace") and _first_dense(fields, num_layers, default=0) != dense:
        fields.refuse("first_k_dense_replace", "must agree with mlp_layer_types, in which the first layer is dense")
    return dense


DEEPSEEK_V2 = Family(
    name=V2,
    architecture="DeepseekV2ForCausalLM",
    fields=decoder_fields(*FIELDS, "first_k_dense_replace", "topk_method", no_effect=NO_EFFECT, one_value=V2_VALUES),
    read=_read_deepseek_v2,
)
DEEPSEEK_V3 = Family(
    name=V3,
    architecture="DeepseekV3ForCausalLM",
    fields=decoder_fields(
        *FIELDS,
        "first_k_dense_replace",
        "norm_topk_prob",
        "rope_interleave",
        no_effect=NO_EFFECT,
        one_value=V3_VALUES,
    ),
    read=_read_deepseek_v3,
    other_names=(KIMI,),
)
GLM4_MOE_LITE = Family(
    name=GLM,
    architecture="Glm4MoeLiteForCausalLM",
    fields=decoder_fields(
        *FIELDS,
        "first_k_dense_replace",
        "mlp_layer_types",
        "norm_topk_prob",
        "rope_interleave",
        no_effect=NO_EFFECT,
        one_value=V3_VALUES,
    ),
    read=_read_glm4_moe_lite,
)
LATENT_FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE)
