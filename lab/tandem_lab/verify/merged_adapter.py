"""A PEFT adapter merged into the weights of transformers' model: the reference for the adapters of an engine.

    W' = W + s · B A        in float64

It shares no code with the engine's reader, and applies patterns as PEFT does.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from torch import nn

PREFIX = "base_model.model."
DEFAULT = 8
"""PEFT's, of rank and alpha."""


def merge_adapter(model: nn.Module, folder: str | Path) -> None:
    """Add what the adapter in `folder` adds to the weights of `model`, in place."""
    from safetensors.torch import load_file

    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = tensors[f"{PREFIX}{module}.lora_B.weight"]
        weight = model.get_submodule(module).weight
        assert isinstance(weight, nn.Parameter), f"{module} has no weight"
        added = scale_of(config, module) * (b.double() @ a.double())
        weight.data = (weight.data.double() + added).to(weight.dtype)


def scale_of(config: dict[str, Any], module: str) -> float:
    """What B A is multiplied by."""
    rank = _of(config.get("rank_pattern") or {}, module, config.get("r", DEFAULT))
    alpha = _of(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", DEFAULT))
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _of(pattern: dict[str, float], module: str, otherwise: float) -> float:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)
