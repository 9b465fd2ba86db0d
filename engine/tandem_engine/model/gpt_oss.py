"""gpt_oss: its config.json, and its tensors under our names.

Differences to a plain decoder with experts:

    attention   a sink for each query head; every second layer has a window, the first one included; biases on all
                four projections
    router      softmax over the scores of the chosen experts alone, which is that over all experts scaled to sum to 1
    experts     biases; gate and up bounded, (up + 1) · gate · sigmoid(alpha · gate)
    norms       rounded after the weight is applied
    rotation    YaRN whose ramp is not cut to whole dimensions (`truncate` false), also where the file has no parameters

Experts of a layer are stored together, their gate and up as one matrix whose outputs alternate:

    mlp.experts.gate_up_proj          [E, hidden, 2 · I]                    in the dtype: inputs first, unlike elsewhere
    mlp.experts.gate_up_proj_blocks   uint8 [E, 2 · I, hidden / 32, 16]     MXFP4, see `quantization.formats`
    mlp.experts.gate_up_proj_scales   uint8 [E, 2 · I, hidden / 32]
    mlp.experts.gate_up_proj_bias     [E, 2 · I]

and `down_proj` likewise, [E, I, hidden]. Each becomes one entry per expert: `mlp.experts.3.gate_up_proj.weight` [2 · I,
hidden], `.bias`, or `.blocks` and `.scales`, which `dequantized` puts together.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem_engine.config import Activation, GateClamp, ModelConfig, NormKind
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor
from tandem_engine.model.config_fields import (
    FULL,
    MAX_EXPERTS,
    SLIDING,
    ConfigFields,
    Defaults,
    expert_count,
    in_sliding_layers,
    read_decoder,
    read_experts,
    read_layer_kinds,
    require_silu,
)
from tandem_engine.model.known_fields import decoder_fields

NAME = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"

FIELDS = decoder_fields(
    "attention_bias",
    "hidden_act",
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


def read_gpt_oss(fields: ConfigFields) -> ModelConfig:
    """See `Family.read`."""
    base = read_decoder(_with_rope(fields), family=NAME, defaults=DEFAULTS)
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=alternating)
    bias = fields.flag("attention_bias", default=True)
    require_silu(fields)
    moe = read_experts(fields, count=expert_count(fields, "num_local_experts"), size="intermediate_size")
    return replace(
        base,
        attention_bias=bias,
        output_bias=bias,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposedTensor:
    """Implements `ReadableTensor`: a stored matrix [inputs, outputs] as one [outputs, inputs]."""

    name: str
    stored: StoredTensor

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.stored.path

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs first."""
        return self.stored.shape[::-1]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.stored.size

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The stored matrix."""
        return (self.stored,)

    def read_part(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `ReadableTensor.read_part`."""
        return self.stored.read_part(1 - dim, start, stop).t()


_EXPERTS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)(?:_(?P<part>[a-z]+))?")
_RANKS = {None: 3, "blocks": 4, "scales": 3, "bias": 2}


def unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` with an entry for each expert, and the router under our name. What has an odd shape keeps its name."""
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match and len(tensor.shape) == _RANKS.get(match["part"]) and tensor.shape[0] <= MAX_EXPERTS:
            result.update(_unstack(match["experts"], f"{match['name']}.{match['part'] or 'weight'}", tensor))
        else:
            result[name.replace(".mlp.router.", ".mlp.gate.")] = tensor
    return result


def _unstack(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    count, *shape = tensor.shape
    size = tensor.size // count if count else 0
    for index in range(count):
        part = replace(tensor, shape=tuple(shape), offset=tensor.offset + index * size, size=size)
        yield f"{experts}.{index}.{name}", part


def outputs_first(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with the plain matrices of `unstacked` experts as other families have them."""
    return {
        name: TransposedTensor(name=name, stored=tensor)
        if isinstance(tensor, StoredTensor) and ".mlp.experts." in name and len(tensor.shape) == 2
        else tensor
        for name, tensor in tensors.items()
    }
