"""Gemma 4, its text: config.json.

As Gemma 3 (`gemma`), but

    norms       scale by weight, not by 1 + weight; heads of v are normalized too, by no weights
    scores      are not scaled
    heads       of layers that see all tokens have another size and number: `global_head_dim` and, with
                `attention_k_eq_v`, `num_global_key_value_heads`. transformers writes both as `per_layer_config`
    rotation    "proportional" in those layers: the first pairs of dimensions turn, by frequencies of whole heads
    values      with `attention_k_eq_v`, in those layers, what keys are before norm and rotation
    readers     the last `num_kv_shared_layers` read K and V of the last layer of their kind before them
    inputs      `hidden_size_per_layer_input` numbers of each token for each layer, besides the hidden states
    experts     with `enable_moe_block`, next to the feed-forward block of every layer
"""

import math
from dataclasses import replace

from tandem_engine.config import (
    Activation,
    ModelConfig,
    MoeConfig,
    NormKind,
    NormPlacement,
    QkNorm,
    RopeConfig,
    VariedConfig,
)
from tandem_engine.model.config_fields import (
    FULL,
    MAX_FACTOR,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_THETA,
    MAX_VOCAB,
    SLIDING,
    ConfigFields,
    Defaults,
    read_experts,
    read_positions,
    read_sizes,
)
from tandem_engine.model.families.gemma import MAX_CAP
from tandem_engine.model.families.windows import in_sliding_layers, read_layer_kinds
from tandem_engine.model.known_fields import BIASES, DECODER, Family, KnownFields

NAME = "gemma4_text"
DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, tie_embeddings=True)
DEFAULT_WINDOW = 512
DEFAULT_PATTERN = 6
DEFAULT_WIDE_HEAD = 512
DEFAULT_INPUT_SIZE = 256
DEFAULT_INPUT_VOCAB = 262_144
PROPORTIONAL = "proportional"
DEFAULT_ROPES: dict[str, dict[str, object]] = {
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
ROPE_FIELDS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "factor"})


def _read_gemma4(fields: ConfigFields) -> ModelConfig:
    if fields.has("hidden_activation") and fields.values["hidden_activation"] != "gelu_pytorch_tanh":
        fields.defer("hidden_activation", "must be gelu_pytorch_tanh")
    context = read_positions(fields)
    base = read_sizes(fields, family=NAME, defaults=DEFAULTS, rope=RopeConfig(), context=context)
    kinds = _layer_kinds(fields, base.num_layers)
    wide = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    varied = _varied(fields, base, wide, kinds)
    return replace(
        base,
        rope=_rope(fields, SLIDING, head_dim=base.head_dim) if SLIDING in kinds else RopeConfig(),
        second_rope=_rope(fields, FULL, head_dim=varied.wide_head_dim),
        second_layers=wide,
        windows=in_sliding_layers(fields, kinds, context=context, default=DEFAULT_WINDOW),
        attention_scale=1.0,
        embedding_scale=math.sqrt(base.hidden_size),
        activation=Activation.GELU_TANH,
        norm=NormKind.ROUND_LAST,
        norm_placement=NormPlacement.AROUND,
        qk_norm=QkNorm.HEADS,
        logit_soft_cap=fields.optional_number("final_logit_softcapping", least=1e-3, most=MAX_CAP, default=None),
        moe=_experts(fields),
        varied=varied,
    )


def _layer_kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    default = [FULL if (layer + 1) % DEFAULT_PATTERN == 0 else SLIDING for layer in range(num_layers)]
    kinds = read_layer_kinds(fields, default=(*default[:-1], FULL))
    if kinds[-1] != FULL:
        fields.refuse("layer_types", f"must end with {FULL}")
    return kinds


def _varied(fields: ConfigFields, base: ModelConfig, wide: tuple[int, ...], kinds: tuple[str, ...]) -> VariedConfig:
    same = fields.flag("attention_k_eq_v", default=False)
    heads, size = _wide_heads(fields, base, wide, same=same)
    readers = fields.integer("num_kv_shared_layers", least=0, most=MAX_LAYERS, default=0)
    if set(kinds) != set(kinds[: max(0, base.num_layers - readers)]):
        fields.refuse("num_kv_shared_layers", "must leave a layer of each kind in layer_types that keeps K and V")
    doubled = fields.flag("use_double_wide_mlp", default=False)
    inputs = fields.integer("hidden_size_per_layer_input", least=0, most=MAX_HIDDEN, default=DEFAULT_INPUT_SIZE)
    rows = fields.integer("vocab_size_per_layer_input", least=1, most=MAX_VOCAB, default=DEFAULT_INPUT_VOCAB)
    if inputs and rows < base.vocab_size:
        fields.refuse("vocab_size_per_layer_input", f"must be at least vocab_size ({base.vocab_size})")
    return VariedConfig(
        wide_kv_heads=heads,
        wide_head_dim=size,
        keys_are_values=same,
        readers=readers,
        reader_intermediate_size=base.intermediate_size * (2 if doubled else 1),
        input_size=inputs,
        input_vocab_size=rows,
    )


def _wide_heads(fields: ConfigFields, base: ModelConfig, wide: tuple[int, ...], *, same: bool) -> tuple[int, int]:
    """KV heads of layers that see all tokens, and their size, by either spelling."""
    owner, kv, size = fields, "num_global_key_value_heads", "global_head_dim"
    default = DEFAULT_WIDE_HEAD
    if fields.has("per_layer_config"):
        for name in (kv, size):
            if fields.has(name):
                fields.refuse(name, "and per_layer_config contradict each other; remove one")
        owner, kv, size = _written_heads(fields, wide), "num_key_value_heads", "head_dim"
        default = base.head_dim
    count = base.num_kv_heads
    if same or owner is not fields:
        count = owner.integer(kv, least=1, most=MAX_HEADS, default=count)
    if base.num_heads % count:
        owner.refuse(kv, f"must divide num_attention_heads ({base.num_heads})")
    width = owner.integer(size, least=4, most=MAX_HEAD_DIM, default=default)
    if width % 2:
        owner.refuse(size, f"must be even, and is {width}")
    return count, width


def _written_heads(fields: ConfigFields, wide: tuple[int, ...]) -> ConfigFields:
    """What `per_layer_config` has for each of the layers `wide`, and for no other one. It is empty where they do not
    differ from the others."""
    layers = fields.inner("per_layer_config")
    if not layers.values:
        return layers
    own = list(layers.values.values())
    if layers.values.keys() != {str(layer) for layer in wide} or any(each != own[0] for each in own):
        fields.refuse("per_layer_config", f"must have the same object for each layer with {FULL}, and no other")
    heads = layers.inner(str(wide[0]))
    for name in heads.values:
        if name not in ("head_dim", "num_key_value_heads"):
            heads.defer(name, "is a field that layers are not known to differ in")
    return heads


def _rope(fields: ConfigFields, kind: str, *, head_dim: int) -> RopeConfig:
    if fields.has("rope_parameters"):
        sets = fields.inner("rope_parameters")
        for name, value in sets.values.items():
            if name not in DEFAULT_ROPES and value is not None:
                fields.defer("rope_parameters", f"must have one object for {FULL} and one for {SLIDING}")
        if not sets.has(kind):
            fields.refuse("rope_parameters", f"must have an object for {kind}")
        own = sets.inner(kind)
    else:
        own = replace(fields, values=DEFAULT_ROPES[kind])
    for name, value in own.values.items():
        if name not in ROPE_FIELDS and value is not None:
            own.defer(name, "is no rotary parameter that is known")
    if own.values.get("rope_type") not in ("default", PROPORTIONAL):
        own.defer("rope_type", f"must be default or {PROPORTIONAL}")
    theta = own.number("rope_theta", least=1.001, most=MAX_THETA)
    if own.values["rope_type"] == "default":
        return RopeConfig(theta=theta)
    part = own.number("partial_rotary_factor", least=0, most=1, default=1.0)
    return RopeConfig(
        rope_type=PROPORTIONAL,
        theta=theta,
        factor=own.number("factor", least=1.0, most=MAX_FACTOR, default=1.0),
        turning_pairs=int(part * head_dim // 2),
    )


def _experts(fields: ConfigFields) -> MoeConfig | None:
    if not fields.flag("enable_moe_block", default=False):
        return None
    moe = read_experts(fields, count="num_experts", size="moe_intermediate_size", chosen_field="top_k_experts")
    return replace(moe, beside=True)


ABSENT = ("original_max_position_embeddings", "partial_rotary_factor", "rope_scaling", "rope_theta")
"""What other families may have next to `rope_parameters`. transformers does not read it in this one."""

GEMMA4 = Family(
    name=NAME,
    architecture="Gemma4ForCausalLM",
    fields=KnownFields(
        implemented=DECODER.difference(ABSENT)
        | {
            "attention_bias",
            "attention_k_eq_v",
            "enable_moe_block",
            "final_logit_softcapping",
            "global_head_dim",
            "hidden_activation",
            "hidden_size_per_layer_input",
            "layer_types",
            "moe_intermediate_size",
            "num_experts",
            "num_global_key_value_heads",
            "num_kv_shared_layers",
            "per_layer_config",
            "sliding_window",
            "top_k_experts",
            "use_double_wide_mlp",
            "vocab_size_per_layer_input",
        },
        common=(BIASES,),
        # With "vision" tokens of images see later ones, and there are none.
        one_value={"use_bidirectional_attention": (None, "vision"), **dict.fromkeys(ABSENT, (None,))},
    ),
    read=_read_gemma4,
)
