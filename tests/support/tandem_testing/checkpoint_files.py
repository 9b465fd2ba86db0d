"""Model directories written file by file, sound or broken in one chosen way, without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.tensor_names import expected_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}

COMPUTED: dict[str, Any] = {"head_dim": 16}
"""For tests that compute with the model: its heads have the size of others, so that their kernels are there."""


def write_config(directory: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """`CONFIG` with `changes` as config.json."""
    values = {name: value for name, value in {**CONFIG, **changes}.items() if name not in without}
    path = directory / "config.json"
    # Some file systems (ext4) write a file to disk at once that takes the place of another: milliseconds, of thousands.
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(values))
    return directory


def random_tensors(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All tensors that the config.json in `directory` implies."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(parse_config(open_directory(directory)))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(directory: Path, *, seed: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    """A sound checkpoint of one file; returns what it holds."""
    write_config(directory, **config)
    tensors = random_tensors(directory, seed=seed)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def write_sharded(directory: Path, tensors: dict[str, torch.Tensor], *, shards: int = 2) -> dict[str, str]:
    """`tensors` dealt over shards with an index; returns its weight_map."""
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw_safetensors(path: Path, header: object, data: bytes, *, header_length: int | None = None) -> Path:
    """A safetensors file byte by byte. `header` is JSON text, bytes, or a value to dump."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_length is None else header_length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path
