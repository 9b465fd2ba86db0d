"""The layer of a checkpoint that predicts a further token (MTP), as a draft head.

DeepSeek V3, GLM-4.5 and GLM-4.7-Flash have one behind their last layer, Qwen3-Next and Qwen3.5 one beside the model. It
is an `EagleHead` whose inputs are normalized first:

    token at i        ─▶ embedding ─▶ enorm ─┐
    last state, i − 1 ─▶ hnorm ──────────────┴▶ eh_proj ─▶ a layer of the model ─▶ shared_head.norm ─▶ output matrix

These are the names of DeepSeek; `BESIDE` has those of Qwen. Where most layers of the model keep states, this one does
not. It drafts any number of tokens, each from its own state of the one before. Its folder is the model's own. Copies of
the embedding and the output matrix, which it shares with the model, are left out; of several such layers behind the
last one the first is read.
"""

from dataclasses import replace

import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.model.blocks import BlockBuilder
from tandem_engine.model.checkpoint import open_stored
from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor
from tandem_engine.model.checkpoint_folder import ModelDirectory, open_directory
from tandem_engine.model.config_fields import MAX_LAYERS, ConfigFields, read_fields
from tandem_engine.model.families.text_towers import text_part
from tandem_engine.model.layers.attention import rotary_table
from tandem_engine.model.layers.linear import projection
from tandem_engine.model.layers.norm import Norm, rms_norm
from tandem_engine.model.loader import WeightReader
from tandem_engine.model.quantization.dequantized import dequantized
from tandem_engine.model.quantization.kv_scales import without_scales
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_engine.model.tensor_aliases import ALIASES, Aliases, canonical_tensors
from tandem_engine.model.tensor_names import FINAL_NORM, expected_shapes, layer_prefix
from tandem_engine.model.weights import heads_of_rank
from tandem_engine.speculative.eagle import SHARED, EagleHead, require_head

FIRST = layer_prefix(0)
FUSE, TOKEN_NORM, STATE_NORM, NORM = (
    f"{FIRST}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
)
COPIES = (f"{FIRST}embed_tokens.", f"{FIRST}shared_head.head.")

BESIDE = {
    "layers.0.": "",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
}
"""Beginnings of names of a layer beside the model, without its own beginning, to those of a layer behind it."""


def can_predict_ahead(config: ModelConfig) -> bool:
    """Whether checkpoints of the family may have such a layer."""
    return ALIASES.get(config.family, Aliases()).can_predict_ahead


def has_layer_ahead(path: str, target: ModelConfig) -> bool:
    """Whether the checkpoint in `path`, which is that of `target`, has such a layer. Raises `CheckpointError`."""
    return can_predict_ahead(target) and FUSE in _stored(open_directory(path), target)


def read_mtp(path: str, target: ModelConfig) -> ModelConfig:
    """The layer as a model of one, of the checkpoint in `path`, which is that of `target`.

    Raises:
        CheckpointError: there is none, a tensor of it is missing, superfluous or misshapen, or a field of config.json
            says that it is of another kind.
    """
    moe = None if target.moe is None else replace(target.moe, dense_layers=())
    config = replace(target, num_layers=1, moe=moe, delta=None)
    directory = open_directory(path)
    if ALIASES[target.family].layer_beside:
        _require_one_layer(text_part(read_fields(directory)))
    tensors = _tensors(directory, target, config)
    if FUSE not in tensors:
        raise CheckpointError(
            f"the model in {path} has no layer that predicts ahead (MTP); --speculative-draft-model-path must name a "
            "draft head"
        )
    require_head(mtp_shapes(config), tensors, where=directory.path)
    return config


def _require_one_layer(fields: ConfigFields) -> None:
    """Of Qwen. Raises `CheckpointError`, naming the field."""
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if fields.has(name) and fields.integer(name, least=0, most=MAX_LAYERS) != 1:
            fields.refuse(name, "must be 1 for the layer to draft; leave out --speculative-algorithm EAGLE")
    if fields.flag("mtp_use_dedicated_embeddings", default=False):
        fields.refuse(
            "mtp_use_dedicated_embeddings",
            "must be false for the layer to draft, which uses the model's; leave out --speculative-algorithm EAGLE",
        )


def _stored(directory: ModelDirectory, target: ModelConfig) -> dict[str, StoredTensor]:
    """Those of the layer under the names of a layer 0 that predicts ahead, copies included."""
    tensors = without_scales(open_stored(directory, target))
    beside = ALIASES[target.family].layer_beside
    if not beside:
        prefix = layer_prefix(target.num_layers)
        return {
            FIRST + name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
    return {
        FIRST + _behind(name.removeprefix(beside)): tensor
        for name, tensor in tensors.items()
        if name.startswith(beside)
    }


def _behind(name: str) -> str:
    """`name` as of a layer behind the model; an unknown one is kept, and is refused."""
    part = next((part for part in BESIDE if name.startswith(part)), None)
    return name if part is None else BESIDE[part] + name.removeprefix(part)


def _tensors(directory: ModelDirectory, target: ModelConfig, config: ModelConfig) -> dict[str, ReadableTensor]:
    """Those of the layer, under the names of layer 0 of a model of `config`."""
    stored = _stored(directory, target)
    own = {name: replace(tensor, name=name) for name, tensor in stored.items() if not name.startswith(COPIES)}
    return canonical_tensors(dequantized(own, read_scheme(read_fields(directory))), config)


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the layer, a model of `config`."""
    size = config.hidden_size
    block = {name: shape for name, shape in expected_shapes(config).items() if name not in (*SHARED, FINAL_NORM)}
    return {FUSE: (size, 2 * size), **dict.fromkeys((TOKEN_NORM, STATE_NORM, NORM), (size,)), **block}


def load_mtp(
    path: str, target: ModelConfig, config: ModelConfig, *, dtype: torch.dtype, device: str, positions: int
) -> EagleHead:
    """Read the weights of a layer that `read_mtp` has accepted as `config`. Raises `CheckpointError`."""
    place = torch.device(device)
    tensors = _tensors(open_directory(path), target, config)
    weights = WeightReader(tensors=tensors, dtype=dtype, device=place, advance=lambda _size: None)

    def norm(name: str) -> Norm:
        return rms_norm(weights.stacked(name), eps=config.rms_eps, kind=config.norm)

    return EagleHead(
        fc=projection(weights.stacked(FUSE)),
        block=BlockBuilder(config=config, weights=weights, heads=heads_of_rank(config, 1)).block(0),
        norm=norm(NORM),
        rotary=rotary_table(config.rope, head_dim=config.rotary_heads, positions=positions, dtype=dtype, device=place),
        token_norm=norm(TOKEN_NORM),
        state_norm=norm(STATE_NORM),
    )
