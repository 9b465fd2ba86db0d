"""Tensors of checkpoints under our names: families that name or join them otherwise.

`tensor_names` has our names, and those of experts, which several families share. Here a family's names are

    renamed     parts of a name
    joined      one matrix for several projections with the same input, which become ranges of its rows. They are read,
                checked and shared by ranks like any other matrix
    skipped     weights that the layers of the model do not read: those of layers that predict several tokens (MTP),
                beyond the last one, which may draft (`speculative.mtp`), or beside the model, and K and V of layers
                that read those of others
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor
from tandem_engine.model.quantization.dequantized import DequantizedRows, DequantizedTensor
from tandem_engine.model.stacked_experts import unstacked_llama4
from tandem_engine.model.tensor_names import CHOICE_BIAS, DELTA, KEY_VALUE, canonical_experts

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DELTA_CONV = tuple(f"{DELTA}conv1d_{name}" for name in "qkv")
DELTA_QKV = tuple(f"{DELTA}in_proj_{name}" for name in "qkv")

PREDICTS_AHEAD = "eh_proj.weight"
"""A matrix that MTP layers have and no others: a number of layers that is too small is noticed."""

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d{1,6})\.(?P<name>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Aliases:
    """How a family's names differ from ours."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names, to ours. At most one applies to a name: the first that occurs in it."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names within a layer, to those of the projections, in the order of their rows."""
    inputs_first: bool = False
    """Whether experts of a layer are stored together and their inputs first (`stacked_experts`)."""
    extra_layers: bool = False
    """Whether there may be layers beyond the last one, each with a `PREDICTS_AHEAD`."""
    layer_beside: str = ""
    """Beginning of names of a layer beside the model that predicts ahead; empty where there is none."""
    skipped: tuple[str, ...] = ()
    """Beginnings of names of what is not served."""

    @property
    def can_predict_ahead(self) -> bool:
        """Whether checkpoints may have a layer that drafts (`speculative.mtp`)."""
        return self.extra_layers or bool(self.layer_beside)


_SHARED = {"mlp.shared_experts": "mlp.shared_expert"}
_HUNYUAN = {"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}

_QWEN3_5 = Aliases(
    joined={f"{DELTA}conv1d": DELTA_CONV, f"{DELTA}in_proj_qkv": DELTA_QKV},
    layer_beside="mtp.",
)

ALIASES: Mapping[str, Aliases] = {
    "ernie4_5_moe": Aliases(
        renamed={
            "mlp.gate.moe_statics": "mlp.gate",
            "mlp.moe_statics": "mlp.gate",
            "mlp.shared_experts": "mlp.shared_expert",
        },
        skipped=("model.mtp_",),
    ),
    "gemma4_text": Aliases(renamed={"router.proj": "mlp.gate", "experts": "mlp.experts"}),
    "glm4": Aliases(
        renamed={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        joined={"mlp.gate_up_proj": GATE_UP},
    ),
    "deepseek_v2": Aliases(renamed=_SHARED),
    "deepseek_v3": Aliases(renamed=_SHARED, extra_layers=True),
    "glm4_moe": Aliases(renamed=_SHARED, extra_layers=True),
    "glm4_moe_lite": Aliases(renamed=_SHARED, extra_layers=True),
    "hunyuan_v1_dense": Aliases(renamed=_HUNYUAN),
    "hunyuan_v1_moe": Aliases(
        renamed={**_HUNYUAN, "mlp.gate.wg": "mlp.gate", "mlp.shared_mlp": "mlp.shared_expert"},
    ),
    "llama4_text": Aliases(
        renamed={"feed_forward.router": "mlp.gate", "feed_forward": "mlp"},
        inputs_first=True,
    ),
    "minimax_m2": Aliases(renamed={"mlp.e_score_correction_bias": CHOICE_BIAS}),
    "phi3": Aliases(joined={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}),
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": Aliases(joined={f"{DELTA}conv1d": DELTA_CONV}, layer_beside="mtp."),
}
"""By family."""


def canonical_tensors(tensors: Mapping[str, ReadableTensor], config: ModelConfig) -> dict[str, ReadableTensor]:
    """`tensors` of a checkpoint of `config` under our names; what has an odd shape keeps its name."""
    aliases = ALIASES.get(config.family, Aliases())
    found = canonical_experts(unstacked_llama4(tensors) if aliases.inputs_first else tensors)
    result: dict[str, ReadableTensor] = {}
    for name, tensor in found.items():
        if not _is_skipped(name, aliases, config, found):
            result |= dict(_ours(_renamed(name, aliases), tensor, aliases, config))
    return result


def _is_skipped(name: str, aliases: Aliases, config: ModelConfig, found: Container[str]) -> bool:
    match = _LAYER.fullmatch(name) if aliases.extra_layers else None
    if match is not None and int(match["layer"]) >= config.num_layers:
        return f"model.layers.{match['layer']}.{PREDICTS_AHEAD}" in found
    if aliases.layer_beside and name.startswith(aliases.layer_beside):
        return True
    return name.startswith(aliases.skipped) or _is_of_reader(name, config)


def _is_of_reader(name: str, config: ModelConfig) -> bool:
    """Whether it is of K and V, in a layer that reads those of another: such weights are published and not used."""
    match = _LAYER.fullmatch(name) if config.reading_layers else None
    return match is not None and int(match["layer"]) in config.reading_layers and match["name"].startswith(KEY_VALUE)


def _renamed(name: str, aliases: Aliases) -> str:
    dotted = f".{name}."
    part = next((part for part in aliases.renamed if f".{part}." in dotted), None)
    return name if part is None else dotted.replace(f".{part}.", f".{aliases.renamed[part]}.")[1:-1]


def _ours(
    name: str, tensor: ReadableTensor, aliases: Aliases, config: ModelConfig
) -> Iterator[tuple[str, ReadableTensor]]:
    """The tensor, or the projections that are joined in it."""
    if isinstance(tensor, StoredTensor) and name.endswith(CHOICE_BIAS) and tensor.shape[:1] == (1,):
        tensor = replace(tensor, shape=tensor.shape[1:])  # ERNIE has a row for each kind of input
    match = _LAYER.fullmatch(name)
    base, _, kind = (match["name"] if match else "").rpartition(".")
    parts = aliases.joined.get(base)
    if match is None or parts is None or sum(_rows(config, part) for part in parts) != tensor.shape[0]:
        yield name, tensor
        return
    start = 0
    for part in parts:
        stop = start + _rows(config, part)
        ours = f"model.layers.{match['layer']}.{part}.{kind}"
        yield ours, _range_of(tensor, ours, start, stop)
        start = stop


def _rows(config: ModelConfig, projection: str) -> int:
    if projection.startswith(DELTA):
        if config.delta is None:
            return 0  # it has no such part, and the tensor keeps its name
        return config.delta.value_width if projection.endswith("_v") else config.delta.key_width
    match projection.rpartition(".")[2]:
        case "q_proj":
            return config.num_heads * config.head_dim
        case "k_proj" | "v_proj":
            return config.num_kv_heads * config.head_dim
    return config.intermediate_size


def _range_of(tensor: ReadableTensor, name: str, start: int, stop: int) -> ReadableTensor:
    """Rows [start, stop)."""
    if isinstance(tensor, DequantizedTensor):
        return DequantizedRows(name=name, whole=tensor, start=start, stop=stop)
    assert isinstance(tensor, StoredTensor), f"rows of a {type(tensor).__name__}"
    row = tensor.size // tensor.shape[0]
    return replace(
        tensor,
        shape=(stop - start, *tensor.shape[1:]),
        offset=tensor.offset + start * row,
        size=(stop - start) * row,
    )
