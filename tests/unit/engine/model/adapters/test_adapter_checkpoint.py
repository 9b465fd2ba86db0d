"""Folders of adapters: accepted with all sizes known, or refused by field or tensor before any tensor is read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.model.adapters.checkpoint import MAX_HEADER, AdapterCheckpoint, open_adapter
from tandem_engine.model.checkpoint import read_model_config
from tandem_testing.adapters import SEVEN, read_files, write_adapter, write_files
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

MODEL = Path(__file__).resolve().parents[5] / "models" / "tandem-mini"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, Tensor], dict[str, Any]], object]


@pytest.fixture(scope="module")
def base() -> ModelConfig:
    return read_model_config(MODEL)


def opened(folder: Path, base: ModelConfig, *, max_rank: int = 64) -> AdapterCheckpoint:
    return open_adapter(folder, base, max_rank=max_rank)


def edited(folder: Path, edit: Edit, **options: Any) -> Path:
    write_adapter(folder, MODEL, layers=[0], **options)
    tensors, fields = read_files(folder)
    edit(tensors, fields)
    return write_files(folder, tensors, fields)


def test_pairs_and_bytes_are_known_before_tensors_are_read(tmp_path: Path, base: ModelConfig, monkeypatch) -> None:
    folder = write_adapter(tmp_path, MODEL, rank=4, ranks={"k_proj": 2})
    monkeypatch.setattr("tandem_engine.model.checkpoint_files.StoredTensor.read", None)
    found = opened(folder, base)
    tensors, _ = read_files(folder)
    assert len(found.pairs) == 7 * base.num_layers
    assert found.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert found.rank == 4
    assert {pair.rank for pair in found.pairs if pair.projection == "self_attn.k_proj"} == {2}


def test_header_of_many_bytes_is_refused_before_it_is_read(tmp_path: Path, base: ModelConfig) -> None:
    weights = write_adapter(tmp_path, MODEL) / "adapter_model.safetensors"
    weights.write_bytes((MAX_HEADER + 1).to_bytes(8, "little"))
    os.truncate(weights, 8 + MAX_HEADER + 1)
    with pytest.raises(CheckpointError, match=f"header of {MAX_HEADER + 1} bytes exceeds the bound"):
        opened(tmp_path, base)


def test_names_of_a_vision_model_mean_the_same_layers(tmp_path: Path, base: ModelConfig) -> None:
    plain = opened(write_adapter(tmp_path / "plain", MODEL), base)
    vision = opened(write_adapter(tmp_path / "vision", MODEL, prefix="model.language_model."), base)
    places = [[(pair.layer, pair.projection) for pair in one.pairs] for one in (plain, vision)]
    assert places[0] == places[1]


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


BAD: dict[str, tuple[Edit, str]] = {
    "A without B": (lambda t, _: t.pop(f"{Q}.lora_B.weight"), "q_proj.lora_A.weight' has no lora_B"),
    "B without A": (lambda t, _: t.pop(f"{Q}.lora_A.weight"), "q_proj.lora_B.weight' has no lora_A"),
    "layer": (
        lambda t, _: t.update({name.replace("layers.0", "layers.99"): tensor.clone() for name, tensor in t.items()}),
        "is for a projection that the base model does not have",
    ),
    "rank": (lambda _, f: f.update(r=5), r"has shape \[4, .* imply \[5, "),
    "inputs": (
        lambda t, _: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 3)}),
        r"q_proj.lora_A.weight' has shape \[4, 3\]; a projection of shape",
    ),
    "outputs": (
        lambda t, _: t.update({f"{Q}.lora_B.weight": torch.zeros(3, 4)}),
        r"q_proj.lora_B.weight' has shape \[3, 4\]; a projection of shape",
    ),
    "float8": (
        lambda t, _: t.update({f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"].to(torch.float8_e4m3fn)}),
        "is float8_e4m3fn; adapters are float32",
    ),
    "nothing": (lambda t, _: t.clear(), "has no tensors"),
    "DoRA": (
        lambda t, _: t.update({f"{Q}.lora_magnitude_vector.weight": torch.zeros(4)}),
        "belongs to a DoRA adapter",
    ),
    "embedding": (
        lambda t, _: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4)}),
        "belongs to an adapter of an embedding",
    ),
    "bias": (lambda t, _: t.update({f"{Q}.lora_B.bias": torch.zeros(4)}), "is a bias of an adapter"),
    "saved module": (
        lambda t, _: t.update({"base_model.model.lm_head.weight": torch.zeros(4)}),
        "is no matrix of a LoRA adapter",
    ),
    "vision": (
        lambda t, _: t.update({"base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight": torch.zeros(4)}),
        "belongs to the vision part",
    ),
    "experts": (
        lambda t, _: t.update({"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(4)}),
        "belongs to an adapter of experts",
    ),
    "head": (
        lambda t, _: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4)}),
        "module that is no projection of attention",
    ),
    "joined": (
        lambda t, _: t.update({"base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight": torch.zeros(4)}),
        "projections that its base joins in one matrix",
    ),
    "adapter's name": (
        lambda t, _: rename(t, f"{Q}.lora_A.weight", f"{Q}.lora_A.default.weight"),
        "lora_A.default.weight' belongs to an adapter of a module",
    ),
    "twice": (
        lambda t, _: t.update(
            {name.replace("model.layers", "model.language_model.layers"): tensor.clone() for name, tensor in t.items()}
        ),
        "are the same matrix",
    ),
    "listed": (lambda _, f: f.update(target_modules=[*SEVEN, "lm_head"]), "target_modules lists 'lm_head', but"),
    "pattern": (lambda _, f: f.update(rank_pattern={"q_proj": 2}), r"has shape \[4, .* imply \[2, "),
}


@pytest.mark.parametrize("case", BAD)
def test_mismatched_adapter_tensor_is_rejected_by_name(tmp_path: Path, base: ModelConfig, case: str) -> None:
    edit, message = BAD[case]
    with pytest.raises(CheckpointError, match=message):
        opened(edited(tmp_path, edit), base)


def test_listed_module_without_tensors_is_refused(tmp_path: Path, base: ModelConfig) -> None:
    folder = write_adapter(tmp_path, MODEL, modules=["q_proj"], layers=[0])
    tensors, fields = read_files(folder)
    with pytest.raises(CheckpointError, match="target_modules lists 'v_proj'"):
        opened(write_files(folder, tensors, {**fields, "target_modules": ["q_proj", "v_proj"]}), base)
    opened(write_files(folder, tensors, {**fields, "target_modules": ["q_proj", "c_attn"]}), base)


@pytest.mark.parametrize("excluded", [["v_proj"], ["self_attn.v_proj"], ".*v_.*", ["layers.0.self_attn.v_proj"]])
def test_excluded_module_may_have_no_tensors(tmp_path: Path, base: ModelConfig, excluded: list[str] | str) -> None:
    folder = write_adapter(tmp_path, MODEL, modules=["q_proj"], layers=[0])
    tensors, fields = read_files(folder)
    fields = fields | {"target_modules": ["q_proj", "v_proj"]}
    opened(write_files(folder, tensors, fields | {"exclude_modules": excluded}), base)
    with pytest.raises(CheckpointError, match="target_modules lists 'v_proj'"):
        opened(write_files(folder, tensors, fields | {"exclude_modules": ["k_proj"]}), base)


def test_module_that_its_layers_lack_may_have_no_tensors(tmp_path: Path) -> None:
    """Layers of hybrid models have different projections."""
    model = write_tiny_checkpoint("qwen3-next", tmp_path / "model")
    base = read_model_config(model)
    assert base.delta is not None
    state = base.delta.layers[0]
    attention = next(layer for layer in range(base.num_layers) if layer not in base.delta.layers)
    tensors, fields = read_files(write_adapter(tmp_path / "adapter", model, modules=["out_proj"], layers=[state]))
    fields = fields | {"target_modules": ["out_proj", "q_proj"]}

    def written(layers: object) -> Path:
        return write_files(tmp_path / "adapter", tensors, fields | {"layers_to_transform": layers})

    for layers in (state, [state], [state, 10**9]):
        opened(written(layers), base)
    for layers in (None, [], [state, attention]):
        with pytest.raises(CheckpointError, match="target_modules lists 'q_proj'"):
            opened(written(layers), base)


def test_rank_over_the_limit_is_refused_with_both_numbers(tmp_path: Path, base: ModelConfig) -> None:
    folder = write_adapter(tmp_path, MODEL, rank=5)
    opened(folder, base, max_rank=5)
    with pytest.raises(CheckpointError, match="has rank 5; the limit is 4"):
        opened(folder, base, max_rank=4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_model.bin", "is in pickle format"),
        ("adapter_model.safetensors.index.json", "in several files is not supported"),
        (None, "no adapter_model.safetensors in"),
    ],
)
def test_other_forms_of_weights_are_refused(tmp_path: Path, base: ModelConfig, name: str | None, message: str) -> None:
    folder = write_adapter(tmp_path, MODEL)
    (folder / "adapter_model.safetensors").unlink()
    if name is not None:
        (folder / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=message):
        opened(folder, base)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_and_devices_are_refused(tmp_path: Path, base: ModelConfig, file: str) -> None:
    folder = write_adapter(tmp_path / "adapter", MODEL)
    (folder / file).rename(tmp_path / file)
    (folder / file).symlink_to(tmp_path / file)
    with pytest.raises(CheckpointError, match="is a link out of"):
        opened(folder, base)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        opened(folder, base)
