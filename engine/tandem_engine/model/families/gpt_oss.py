"""gpt_oss: its config.json. Its tensors are in `stacked_experts`.

Differences to a plain decoder with experts:

    attention   a sink for each query head; every second layer has a window, the first one included; biases on all
                four projections
    router      softmax over the scores of the chosen experts alone, which is that over all experts scaled to sum to 1
    experts     biases; gate and up bounded, (up + 1) · gate · sigmoid(alpha · gate)
    norms       rounded after the weight is applied
    rotation    YaRN whose ramp is not cut to whole dimensions (`truncate` false), also where the file has no parameters
"""

from collections.abc import Mapping
from dataclasses import replace

from tandem_engine.config import Activation, GateClamp, ModelConfig, NormKind
from tandem_engine.model.config_fields import (
    FULL,
    SLIDING,
    ConfigFields,
    Defaults,
    expert_count,
    read_decoder,
    read_experts,
)
from tandem_engine.model.families.windows import in_sliding_layers, read_layer_kinds
from tandem_engine.model.known_fields import MXFP4_ARCHITECTURE, SILU, Family, biases, decoder_fields

NAME = "gpt_oss"

FIELDS = decoder_fields(
    biases(default=True),
    SILU,
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "sliding_window",
    "swiglu_alpha",
    "swiglu_limit",
    # Of the first release of the weights; transformers reads the rotary parameters and num_experts_per_tok.
    no_effect=("experts_per_token", "initial_context_length"),
)

DEFAULT_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What an absent set of rotary parameters stands for."""

DEFAULTS = Defaults(head_dim=64, num_kv_heads=8, rms_eps=1e-5, rope_theta=150_000.0)
DEFAULT_WINDOW = 128
MAX_SWIGLU = 1e6


def _read_gpt_oss(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(_with_rope(fields), family=NAME, defaults=DEFAULTS)
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=alternating)
    moe = read_experts(fields, count=expert_count(fields, "num_local_experts"), size="intermediate_size")
    return replace(
        base,
        attention_sinks=True,
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW),
        activation=Activation.CLAMPED_SWIGLU,
        gate_clamp=GateClamp(
            alpha=fields.number("swiglu_alpha", least=0.0, most=MAX_SWIGLU, default=1.702),
            limit=fields.number("swiglu_limit", least=0.0, most=MAX_SWIGLU, default=7.0),
        ),
        norm=NormKind.ROUND_LAST,
        moe=replace(moe, bias=True, interleaved=True),
    )


def _with_rope(fields: ConfigFields) -> ConfigFields:
    if fields.values.get("rope_scaling") or fields.values.get("rope_parameters") is not None:
        return fields
    return replace(fields, values=fields.values | {"rope_parameters": dict(DEFAULT_ROPE)})


GPT_OSS = Family(name=NAME, architecture=MXFP4_ARCHITECTURE, fields=FIELDS, read=_read_gpt_oss)
