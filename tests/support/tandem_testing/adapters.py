"""Seeded LoRA adapters as PEFT writes them, for any checkpoint in safetensors.

A and B are both random: PEFT's own B begins as zero, and such an adapter changes nothing. Shapes are read from the
files of the base, not computed.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem_engine.config import ModelConfig
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterPart, AdapterWeights, SiteWeights
from tandem_services.cli.flags import bundled_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SEVEN = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
STATES = {
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "qwen3.5-moe": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
}
"""Of layers with states, by tiny model."""


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 1,
    modules: Sequence[str] = SEVEN,
    layers: Sequence[int] | None = None,
    rank: int = 4,
    alpha: float = 8,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = "model.",
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """An adapter of `modules` in `layers`, all by default. `ranks`: of modules by suffix, written as `rank_pattern`.

    `config`: further fields of its adapter_config.json. `strength`: of what it adds, next to the base's outputs.
    """
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outputs, inputs) in base_modules(base, modules, layers).items():
        own = next((size for suffix, size in (ranks or {}).items() if module.endswith(f".{suffix}")), rank)
        name = f"base_model.model.{prefix}{module.removeprefix('model.')}"
        a = torch.randn((own, inputs), generator=dice) * inputs**-0.5
        b = torch.randn((outputs, own), generator=dice) * strength * own**-0.5
        tensors |= {f"{name}.lora_A.weight": a.to(dtype), f"{name}.lora_B.weight": b.to(dtype)}
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*modules]}
    return write_files(folder, tensors, fields | ({"rank_pattern": dict(ranks)} if ranks else {}) | config)


def write_files(folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Path:
    """An adapter's two files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def read_files(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of an adapter."""
    from safetensors.torch import load_file

    fields: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), fields


def base_modules(base: Path, modules: Sequence[str], layers: Sequence[int] | None) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of projections in the files of `base`, experts left out."""
    from safetensors import safe_open

    found: dict[str, tuple[int, int]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                parts = name.split(".")
                wanted = name.endswith(".weight") and parts[-2] in modules and "expert" not in name
                if wanted and (layers is None or int(parts[parts.index("layers") + 1]) in layers):
                    outputs, inputs = file.get_slice(name).get_shape()
                    found[name.removesuffix(".weight")] = (outputs, inputs)
    assert found, f"{base} has none of {modules}"
    return found


FLEET_ADAPTERS = ("one", "two")
"""Of the fleet of integration tests, by name."""


def write_fleet_adapter(folder: Path, name: str) -> Path:
    """One of them, of the bundled model, in its folder in `folder`."""
    modules = SEVEN if name == "one" else ("q_proj", "down_proj")
    return write_adapter(folder / name, bundled_model(), seed=len(modules), modules=modules, strength=0.2)


def random_adapter(
    config: ModelConfig,
    *,
    seed: int,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    modules: Sequence[str] = SEVEN,
    layers: Collection[int] | None = None,
    halves: Sequence[str] = (),
) -> AdapterWeights:
    """Of projections of a model without experts, whole on one rank. All layers by default.

    `halves`: which of A and B are bfloat16, whatever the model's `dtype`.
    """
    dice = torch.Generator().manual_seed(seed)
    sizes = _outputs_and_inputs(config)
    sites = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for site in Site:
            rows_of_a, parts, first = [], [], 0
            for index, projection in enumerate(site.value):
                outputs, inputs = sizes[projection.rpartition(".")[2]]
                places, first = slice(first, first + outputs), first + outputs
                if projection.rpartition(".")[2] not in modules:
                    continue
                rows = slice(len(parts) * rank, (len(parts) + 1) * rank)
                a = torch.randn((rank, inputs), generator=dice) * inputs**-0.5
                rows_of_a.append(a.bfloat16() if "A" in halves else a)
                b = torch.randn((outputs, rank), generator=dice) * 0.35 * rank**-0.5
                b = b.to(torch.bfloat16 if "B" in halves else dtype)
                parts.append(AdapterPart.of(rows=rows, outputs=places, b=b, scale=0.5 + index))
            if parts:
                sites[layer, site] = SiteWeights(a=torch.cat(rows_of_a), parts=tuple(parts))
    return AdapterWeights(digest=bytes([seed] * 16), rank=rank, sites=sites)


def _outputs_and_inputs(config: ModelConfig) -> dict[str, tuple[int, int]]:
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    columns = {"q_proj": query, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}
    rows = {"o_proj": query, "down_proj": inner}
    return {name: (outputs, hidden) for name, outputs in columns.items()} | {
        name: (hidden, inputs) for name, inputs in rows.items()
    }
