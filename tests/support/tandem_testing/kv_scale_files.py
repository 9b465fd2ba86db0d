"""Checkpoints with scales for float8 KV, one for each head."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_kv_scales(checkpoint: Path, *, layers: int, heads: int, seed: int = 5) -> torch.Tensor:
    """Give a checkpoint of one file random scales; returns them, [layers, 2, heads]."""
    file = checkpoint / "model.safetensors"
    scales = torch.rand(layers, 2, heads, generator=torch.Generator().manual_seed(seed)) + 0.5
    added = {
        f"model.layers.{layer}.self_attn.{side}_scale": scales[layer, index].clone()
        for layer in range(layers)
        for index, side in enumerate("kv")
    }
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    return scales
