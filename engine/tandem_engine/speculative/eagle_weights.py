"""A head's folder: config.json, which describes its block as that of a model of one layer, and its tensors.

    fc.weight                   [hidden_size, 2 * hidden_size]: embedding first, then hidden state
    model.layers.0.…            the block and the final norm, as a model of that family names them
    model.norm.weight

Embedding and output matrix are the target's and not stored. The files are checked as those of a model are.
"""

from pathlib import Path

import torch

from tandem_engine.config import ModelConfig
from tandem_engine.errors import CheckpointError
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.decoder import BlockBuilder
from tandem_engine.model.directory import open_directory
from tandem_engine.model.expert_tensors import canonical_experts
from tandem_engine.model.json_file import shown
from tandem_engine.model.layers.linear import projection
from tandem_engine.model.layers.norm import rms_norm
from tandem_engine.model.layers.rotary import rotary_table
from tandem_engine.model.loader import WeightReader
from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.model.shards import open_tensors
from tandem_engine.model.sharing import heads_of_rank
from tandem_engine.model.tensor_names import EMBEDDING, FINAL_NORM, LM_HEAD, expected_shapes, require_weights
from tandem_engine.speculative.eagle import EagleHead

FUSE = "fc.weight"
SHARED = (EMBEDDING, LM_HEAD)


def read_head_config(path: str, target: ModelConfig) -> ModelConfig:
    """The head's config, compared with the model it is to draft for and with the tensors beside it.

    Raises:
        CheckpointError: the folder is no head, or the head of another model.
    """
    directory = open_directory(path)
    config = parse_config(directory)
    if config.num_layers != 1:
        raise CheckpointError(
            f"{path} is a model of {config.num_layers} layers; --speculative-algorithm EAGLE takes a head of one, "
            "DRAFT a whole model"
        )
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the draft head in {path} reads hidden states of {config.hidden_size}, the model's have "
            f"{target.hidden_size}; use a head that was trained for this model"
        )
    _require(head_shapes(config), _tensors(path), where=directory.path)
    return config


def load_head(path: str, config: ModelConfig, *, dtype: torch.dtype, device: str, positions: int) -> EagleHead:
    """Read the weights of a head whose config `read_head_config` has accepted. Raises `CheckpointError`."""
    place = torch.device(device)
    weights = WeightReader(tensors=_tensors(path), dtype=dtype, device=place, advance=lambda _size: None)
    rope = config.local_rope if 0 in config.local_layers else None
    return EagleHead(
        fc=projection(weights.stacked(FUSE)),
        block=BlockBuilder(config=config, weights=weights, heads=heads_of_rank(config, 1)).block(0),
        norm=rms_norm(weights.stacked(FINAL_NORM), eps=config.rms_eps, kind=config.norm),
        rotary=rotary_table(
            rope or config.rope, head_dim=config.head_dim, positions=positions, dtype=dtype, device=place
        ),
    )


def _tensors(path: str) -> dict[str, ReadableTensor]:
    return canonical_experts(open_tensors(open_directory(path)))


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor in the folder of a head."""
    block = {name: shape for name, shape in expected_shapes(config).items() if name not in SHARED}
    return {FUSE: (config.hidden_size, 2 * config.hidden_size), **block}


def _require(shapes: dict[str, tuple[int, ...]], tensors: dict[str, ReadableTensor], *, where: Path) -> None:
    for name, shape in shapes.items():
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"the draft head in {where} lacks tensor {name}")
        require_weights(stored, shape)
    unknown = sorted(tensors.keys() - shapes.keys())
    if unknown:
        raise CheckpointError(f"tensor {shown(unknown[0])} is no part of a draft head; {where} has it")
