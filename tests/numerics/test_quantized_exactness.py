"""Engines of int8 weights give the tokens that transformers gives with the numbers these stand for, on every path."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.config import EngineConfig, Quantization
from tandem_engine.engine.loaded_model import load
from tandem_engine.model.quantization.levels import int8_levels
from tandem_testing.exactness import CACHED, CHUNKED, DISAGGREGATED, MIXED, RETRACTED, SHARED, run_paths_of
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint


def write_worth(checkpoint, worth) -> None:
    """The checkpoint with its projections rounded to int8 and back."""
    shutil.copytree(checkpoint, worth)
    for file in worth.glob("*.safetensors"):
        tensors = {name: worth_of(name, tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def worth_of(name, tensor):
    """Of Llama 4's experts, which are stored together, inputs first, each is a matrix."""
    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")) and "feed_forward" in name:
        return torch.stack([int8_levels(expert.t().contiguous()).values().t() for expert in tensor]).contiguous()
    return int8_levels(tensor).values() if name.endswith("_proj.weight") else tensor


@pytest.mark.parametrize("name", ["phi4-mini", "glm4-moe", "llama4", "gemma4"])
def test_int8_weights_of_joined_and_reordered_projections(name, tmp_path) -> None:
    """Rows of a joined matrix, rows in another order, a shared expert on two ranks, and experts stored inputs first."""
    checkpoint, worth = write_tiny_checkpoint(name, tmp_path / "stored"), tmp_path / "worth"
    write_worth(checkpoint, worth)
    config = EngineConfig(model_path=str(checkpoint), dtype="float32", quantization=Quantization.INT8)
    results = run_paths_of(load(config, progress=False), (CHUNKED, SHARED), every=4, worth=worth)
    assert [result.difference for result in results] == [None, None]


@pytest.mark.parametrize("name", ["llama-bias", "gemma2", "qwen3-moe"])
def test_int8_weights_take_the_paths_on_which_pages_meet(name, tmp_path) -> None:
    checkpoint, worth = write_tiny_checkpoint(name, tmp_path / "stored"), tmp_path / "worth"
    write_worth(checkpoint, worth)
    assert json.loads((worth / "config.json").read_text())["dtype"] == "float32"
    config = EngineConfig(model_path=str(checkpoint), dtype="float32", quantization=Quantization.INT8)
    model = load(config, progress=False)
    assert "held int8" in model.model_config.quantization
    paths = (CHUNKED, CACHED, MIXED, RETRACTED, DISAGGREGATED, SHARED)
    results = run_paths_of(model, paths, every=2, worth=worth)
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in paths]
