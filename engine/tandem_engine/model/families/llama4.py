"""Llama 4, its text: config.json. Its tensors are in `stacked_experts`.

Differences to a plain decoder with experts:

    attention   layers that rotate see the chunk of `attention_chunk_size` tokens that a token is in, and have q and k
                normalized, by no weights, after their rotation. Every fourth layer sees all tokens and does not rotate;
                its queries grow with their position
    rotation    neighboring pairs; the bounds of `llama3` scaling may be equal
    experts     chosen by their logits, whose sigmoid multiplies what the expert reads; a shared expert of the same
                size; all layers have them, or every second one. The others have blocks of `intermediate_size_mlp`
"""

from dataclasses import replace

from tandem_engine.config import ModelConfig, MoeConfig, QkNorm, QueryScale, Scoring, SharedExpert
from tandem_engine.model.config_fields import (
    FULL,
    MAX_EXPERTS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITION,
    ConfigFields,
    Defaults,
    read_decoder,
    read_experts,
)
from tandem_engine.model.known_fields import BIASES, SILU, Family, decoder_fields
from tandem_engine.model.rotary_fields import NO_ROTATION, layers_without_rotation

CHUNKED = "chunked_attention"
DEFAULTS = Defaults(head_dim=128, null_head_dim=True, num_kv_heads=8, rms_eps=1e-5, rope_theta=5e5)
DEFAULT_CHUNK = 8192
OLDER_TRUE = 4


def _read_llama4(fields: ConfigFields) -> ModelConfig:
    fields = _as_now(fields)
    base = read_decoder(fields, family=LLAMA4.name, defaults=DEFAULTS)
    still = layers_without_rotation(fields, base.num_layers)
    return replace(
        base,
        rope=replace(base.rope, interleaved=True),
        second_rope=NO_ROTATION if still else None,
        second_layers=still,
        intermediate_size=fields.integer("intermediate_size_mlp", least=1, most=MAX_INTERMEDIATE, default=16384),
        qk_norm=QkNorm.ROTATED_PLAIN if fields.flag("use_qk_norm", default=True) else None,
        chunks=_chunks(fields, base, still),
        query_scale=_query_scale(fields),
        moe=_experts(fields, base.num_layers),
    )


def _as_now(fields: ConfigFields) -> ConfigFields:
    """Without what published files have for defaults of today: a list without layers, and 4 for true."""
    older: dict[str, object] = {"no_rope_layers": [], "attn_temperature_tuning": OLDER_TRUE}
    absent: dict[str, object] = {name: None for name, value in older.items() if fields.values.get(name) == value}
    return replace(fields, values=fields.values | absent)


def _chunks(fields: ConfigFields, base: ModelConfig, still: tuple[int, ...]) -> tuple[int | None, ...]:
    """Of each layer; () where none is shorter than the context."""
    size = fields.optional_integer("attention_chunk_size", least=2, most=MAX_POSITION, default=DEFAULT_CHUNK)
    default = [FULL if size is None or layer in still else CHUNKED for layer in range(base.num_layers)]
    kinds = fields.items("layer_types") if fields.has("layer_types") else default
    if len(kinds) != base.num_layers or not all(kind in (FULL, CHUNKED) for kind in kinds):
        fields.refuse("layer_types", f"must name {FULL} or {CHUNKED} for each of the {base.num_layers} layers")
    if CHUNKED not in kinds:
        return ()
    if size is None:
        fields.refuse("attention_chunk_size", f"must be a number, as layer_types has {CHUNKED}")
    return () if size >= base.max_position else tuple(size if kind == CHUNKED else None for kind in kinds)


def _query_scale(fields: ConfigFields) -> QueryScale | None:
    if not fields.flag("attn_temperature_tuning", default=True):
        return None
    return QueryScale(
        beta=fields.number("attn_scale", least=0, most=1e3, default=0.1),
        period=fields.integer("floor_scale", least=1, most=MAX_POSITION, default=8192),
        offset=1,
        unrotated_only=True,
    )


def _experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """None where no layer has experts."""
    sparse = _sparse_layers(fields, num_layers)
    if not sparse:
        fields.integer("num_local_experts", least=0, most=MAX_EXPERTS, default=0)
        return None
    experts = read_experts(fields, count="num_local_experts", size="intermediate_size")
    return replace(
        experts,
        normalize=False,
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        scoring=Scoring.SIGMOID,
        shared=SharedExpert(intermediate_size=experts.intermediate_size),
        weighted_inputs=True,
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> list[object]:
    """By `moe_layers`, or else every `interleave_moe_layer_step`-th one. Dense models may have 0 for the step."""
    named = fields.has("moe_layers")
    step = fields.integer("interleave_moe_layer_step", least=0 if named else 1, most=MAX_LAYERS, default=1)
    if not named:
        return [*range(step - 1, num_layers, step)]
    sparse = fields.items("moe_layers")
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in sparse):
        fields.refuse("moe_layers", f"must name layers from 0 to {num_layers - 1}")
    return sparse


LLAMA4 = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    fields=decoder_fields(
        SILU,
        BIASES,
        "attention_chunk_size",
        "attn_scale",
        "attn_temperature_tuning",
        "floor_scale",
        "interleave_moe_layer_step",
        "intermediate_size_mlp",
        "layer_types",
        "moe_layers",
        "no_rope_layer_interval",
        "no_rope_layers",
        "num_experts_per_tok",
        "num_local_experts",
        "use_qk_norm",
        no_effect=("for_llm_compressor",),
    ),
    read=_read_llama4,
)
