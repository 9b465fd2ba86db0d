"""gpt-oss checkpoints whose experts are MXFP4: random numbers of four bits, packed as in published files."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem_testing.checkpoint_files import random_tensors, write_config

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""OCP Microscaling Formats 1.0, table 6."""

SCHEME: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def random_codes(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes [*shape, inputs] below 16, and exponents [*shape, inputs / 32] around 2^-4, as uint8."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=dice, dtype=torch.uint8)
    exponents = torch.randint(121, 125, (*shape[:-1], shape[-1] // 32), generator=dice, dtype=torch.uint8)
    return codes, exponents


def blocks_of(codes: Tensor) -> Tensor:
    """[*, inputs] to [*, inputs / 32, 16]: two neighbors in a byte, the first in its lower half."""
    pairs = codes.unflatten(-1, (-1, 16, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).contiguous()


def worth_of(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 [*, inputs]"""
    scales = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, dim=-1)
    return torch.tensor(NUMBERS)[codes.int()] * scales


def write_mxfp4(plain: Path, directory: Path, *, worth: Path | None = None, seed: int = 0) -> Path:
    """Copy the gpt-oss checkpoint in `plain` with random experts in MXFP4; into `worth` with what these stand for."""
    tensors, worths = {}, {}
    for number, (name, tensor) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
        if name.endswith(("gate_up_proj", "down_proj")):
            # Stored with inputs first.
            count, inputs, outputs = tensor.shape
            codes, exponents = random_codes(count, outputs, inputs, seed=1000 * seed + number)
            tensors |= {f"{name}_blocks": blocks_of(codes), f"{name}_scales": exponents}
            worths[name] = worth_of(codes, exponents).mT.contiguous()
        else:
            tensors[name] = worths[name] = tensor
    for target, held in ((directory, tensors), (worth, worths)):
        if target is not None:
            shutil.copytree(plain, target, dirs_exist_ok=True)
            save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": SCHEME}))
    return directory


SIZES: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "swiglu_limit": 1.0,
    "head_dim": 16,
}
"""A model whose experts kernels read as they are stored."""


def write_random_mxfp4(directory: Path) -> Path:
    """A checkpoint of `SIZES`, without the help of transformers."""
    write_config(directory, **SIZES)
    tensors: dict[str, Tensor] = {}
    biases: dict[str, list[Tensor]] = {}
    for name, tensor in random_tensors(directory).items():
        layer, found, rest = name.partition(".mlp.experts.")
        if not found:
            tensors[name.replace(".mlp.gate.", ".mlp.router.")] = tensor
        elif name.endswith(".bias"):
            biases.setdefault(f"{layer}{found}{rest.split('.')[1]}", []).append(tensor)
    for number, (name, rows) in enumerate(biases.items()):
        inputs = SIZES["intermediate_size" if name.endswith("down_proj") else "hidden_size"]
        codes, exponents = random_codes(len(rows), len(rows[0]), inputs, seed=number)
        stack = {"bias": torch.stack(rows), "blocks": blocks_of(codes), "scales": exponents}
        tensors |= {f"{name}_{part}": value for part, value in stack.items()}
    save_file(tensors, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": SCHEME}))
    return directory
