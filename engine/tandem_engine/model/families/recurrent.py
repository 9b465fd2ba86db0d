"""qwen3_next, qwen3_5_text and qwen3_5_moe_text: their config.json.

Differences to Qwen3 and Qwen3-MoE:

    layers      most keep a state of fixed size in place of K and V (`layers.delta`); every fourth is attention, whose
                outputs have a gate. `layer_types` says which, or `full_attention_interval`
    norms       scale by 1 + weight, but for the one inside layers with states
    rotation    the first quarter of each head
    experts     and a gated shared one; Qwen3.5 without MoE has none
    MTP         weights under `mtp.` guess further tokens; they may draft (`speculative.mtp`), and are else left out
"""

from dataclasses import replace

from tandem_engine.config import DeltaConfig, ModelConfig, MoeConfig, NormKind, QkNorm, SharedExpert
from tandem_engine.model.config_fields import (
    FULL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    ConfigFields,
    Defaults,
    read_experts,
)
from tandem_engine.model.families.experts import read_sparse_experts
from tandem_engine.model.known_fields import BIASES, SILU, Family, decoder_fields
from tandem_engine.model.rotary_fields import read_partial_decoder

NEXT, DENSE, SPARSE = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
LINEAR = "linear_attention"
ROTATED_PART = 0.25
MAX_KERNEL = 16

FIELDS = (
    BIASES,
    SILU,
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
)
EXPERT_FIELDS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers")
QWEN3_5_VALUES = {"attn_output_gate": (True, None), "mamba_ssm_dtype": ("float32", None), "mlp_only_layers": ([], None)}
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Of a rotation: they are the same positions three times where there are no images."""


def _read_qwen3_next(fields: ConfigFields) -> ModelConfig:
    base = _read_stateful(fields, family=NEXT, kv_heads=2, joined=True)
    return replace(base, moe=_shared(fields, read_sparse_experts(fields, base.num_layers, normalize=True)))


def _read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    return _read_stateful(_without_sections(fields), family=DENSE, kv_heads=4, joined=False)


def _read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    experts = read_experts(fields, count="num_experts", size="moe_intermediate_size")
    # No layer is dense, so files have no size of such a block.
    whole = replace(fields, values=fields.values | {"intermediate_size": experts.intermediate_size})
    base = _read_stateful(_without_sections(whole), family=SPARSE, kv_heads=2, joined=False)
    return replace(base, moe=_shared(fields, experts))


def _read_stateful(fields: ConfigFields, *, family: str, kv_heads: int, joined: bool) -> ModelConfig:
    """All but the experts."""
    base = read_partial_decoder(
        fields, family=family, defaults=Defaults(head_dim=256, num_kv_heads=kv_heads), factor=ROTATED_PART
    )
    return replace(
        base,
        output_gate=True,
        norm=NormKind.UNIT_OFFSET,
        qk_norm=QkNorm.HEADS,
        delta=_delta(fields, base.num_layers, joined=joined),
    )


def _delta(fields: ConfigFields, num_layers: int, *, joined: bool) -> DeltaConfig | None:
    """None where no layer keeps a state. Raises `CheckpointError` where heads do not go together."""
    key_heads = fields.integer("linear_num_key_heads", least=1, most=MAX_HEADS, default=16)
    value_heads = fields.integer("linear_num_value_heads", least=1, most=MAX_HEADS, default=32)
    if value_heads % key_heads:
        fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads ({key_heads})")
    layers = _stateful_layers(fields, num_layers)
    delta = DeltaConfig(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=fields.integer("linear_key_head_dim", least=1, most=MAX_HEAD_DIM, default=128),
        value_size=fields.integer("linear_value_head_dim", least=1, most=MAX_HEAD_DIM, default=128),
        kernel=fields.integer("linear_conv_kernel_dim", least=2, most=MAX_KERNEL, default=4),
        joined=joined,
    )
    return delta if layers else None


def _stateful_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """By `layer_types`, or else by `full_attention_interval`. At least one layer is not among them.

    Raises:
        CheckpointError: a kind is unknown, their number is not that of the layers, or no layer has full attention.
    """
    kinds = fields.items("layer_types")
    named = "layer_types" if fields.has("layer_types") else "full_attention_interval"
    if named != "layer_types":
        interval = fields.integer(named, least=1, most=MAX_LAYERS, default=4)
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if not all(kind in (FULL, LINEAR) for kind in kinds):
        fields.refuse(named, f"may name only {FULL} and {LINEAR}")
    if len(kinds) != num_layers:
        fields.refuse(named, f"must name a kind for each of the {num_layers} layers and names {len(kinds)}")
    if FULL not in kinds:
        fields.refuse(named, f"must leave at least one layer of {num_layers} with {FULL}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def _shared(fields: ConfigFields, experts: MoeConfig) -> MoeConfig:
    size = fields.integer("shared_expert_intermediate_size", least=1, most=MAX_INTERMEDIATE, default=512)
    return replace(experts, shared=SharedExpert(intermediate_size=size, gated=True))


def _without_sections(fields: ConfigFields) -> ConfigFields:
    """With one rotation for all positions of a token, which are equal in text."""
    parameters = fields.values.get("rope_parameters")
    if not isinstance(parameters, dict):
        return fields
    plain = {name: value for name, value in parameters.items() if name not in SECTIONS}
    return replace(fields, values=fields.values | {"rope_parameters": plain})


QWEN3_NEXT = Family(
    name=NEXT,
    architecture="Qwen3NextForCausalLM",
    fields=decoder_fields(
        *FIELDS,
        *EXPERT_FIELDS,
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        no_effect=("max_window_layers", *MTP),
    ),
    read=_read_qwen3_next,
)
QWEN3_5 = Family(
    name=DENSE,
    architecture="Qwen3_5ForCausalLM",
    fields=decoder_fields(*FIELDS, no_effect=MTP, one_value=QWEN3_5_VALUES),
    read=_read_qwen3_5,
)
QWEN3_5_MOE = Family(
    name=SPARSE,
    architecture="Qwen3_5MoeForCausalLM",
    fields=decoder_fields(*FIELDS, *EXPERT_FIELDS, no_effect=MTP, one_value=QWEN3_5_VALUES),
    read=_read_qwen3_5_moe,
)
RECURRENT_FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
