"""Scales of float8 KV that a checkpoint brings, calibrated when it was quantized: for K and for V of each layer.

    model.layers.N.self_attn.k_scale              as vLLM calls it, and compressed-tensors
    model.layers.N.self_attn.k_proj.k_scale       ModelOpt
    model.layers.N.self_attn.k_proj.output_scale  compressed-tensors at first
    model.layers.N.self_attn.kv_scale             AutoFP8: of both

A scale is one number, or one for each K/V head. Whatever has none is stored as it is: with a scale of 1. Scales of
queries and of attention weights, which some checkpoints have too, are for kernels that multiply in float8; ours do not.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.quantization.formats import FLOATS

NAME = re.compile(
    r"model\.layers\.(?P<layer>\d{1,6})\.self_attn\."
    r"(?:(?:attn\.)?(?P<both>kv|k|v|q|prob)_scale|(?P<side>[kvq])_proj\.(?:(?P=side)_scale|output_scale))"
)
SIDES = {"k": (0,), "v": (1,), "kv": (0, 1)}
DIGEST_BYTES = 16
T = TypeVar("T")


def without_scales(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors that are weights."""
    return {name: tensor for name, tensor in tensors.items() if NAME.fullmatch(name) is None}


def read_kv_scales(tensors: Mapping[str, StoredTensor], config: ModelConfig, fields: ConfigFields) -> Tensor | None:
    """Of the whole model, float32 [layers, 2, KV heads]; None where it has none, or none for float8.

    Args:
        tensors: of the checkpoint, as its files have them.
        fields: of its config.json.

    Raises:
        CheckpointError: a scale is not one positive number, or one for each head.
    """
    found = {name: match for name in tensors if (match := NAME.fullmatch(name)) is not None}
    if not found or not _of_float8(fields):
        return None
    scales = torch.ones(config.num_layers, 2, config.num_kv_heads)
    for name, match in found.items():
        layer, sides = int(match["layer"]), SIDES.get(match["both"] or match["side"], ())
        if layer >= config.num_layers:
            raise CheckpointError(f"{tensors[name].path}: tensor {name} is of none of {config.num_layers} layers")
        for side in sides:
            scales[layer, side] = _scale(tensors[name], config.num_kv_heads)
    return scales


def scales_digest(scales: Tensor | None) -> str:
    """Hexadecimal, of scales [layers, 2, KV heads] of a whole model. "" for none, and for nothing but 1."""
    if scales is None or bool((scales == 1).all()):
        return ""
    return hashlib.blake2b(scales.numpy().tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def _of_float8(fields: ConfigFields) -> bool:
    """Whether the scales are for float8, as far as config.json says."""
    scheme = fields.inner("quantization_config").inner("kv_cache_scheme")
    kind, bits = scheme.values.get("type", "float"), scheme.values.get("num_bits", 8)
    return kind == "float" and bits == 8


def _scale(tensor: StoredTensor, heads: int) -> Tensor:
    values = tensor.read().float().flatten() if tensor.dtype in FLOATS else torch.empty(0)
    if values.numel() not in (1, heads) or not bool((values.isfinite() & (values > 0)).all()):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} must be one positive number or one for each of {heads} KV heads, of "
            f"float32, bfloat16 or float16; it is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    return values
