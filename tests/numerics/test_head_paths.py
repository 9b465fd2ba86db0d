"""EAGLE-3 heads and layers ahead on paths of `tandem verify` that have drafts of a head."""

from pathlib import Path

import pytest
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_testing.draft_heads import add_mtp_layer
from tandem_testing.exactness import run_paths_of
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_eagle3

MOVED = "EAGLE drafts, drained mid-stream"
PATHS = ["EAGLE drafts, prefix-cached", "EAGLE drafts, handed over", MOVED, "EAGLE drafts, 2 ranks"]


def with_eagle3(directory: Path) -> Path:
    checkpoint = write_tiny_checkpoint("qwen3", directory / "model")
    write_tiny_eagle3(checkpoint, directory / "model-eagle", layers=(0, 1, 2))
    return checkpoint


def with_layer_ahead(directory: Path) -> Path:
    """Its folder is the model's own."""
    checkpoint = add_mtp_layer(write_tiny_checkpoint("glm4-moe", directory / "model"))
    (directory / "model-eagle").symlink_to(checkpoint)
    return checkpoint


@pytest.mark.parametrize("make", [with_eagle3, with_layer_ahead])
def test_tokens_on_paths_with_a_head_are_those_of_transformers(make, tmp_path):
    torch.set_num_threads(1)
    model = load(EngineConfig(model_path=str(make(tmp_path)), dtype="float32"), progress=False)
    results = run_paths_of(model, PATHS, every=4)
    assert {result.path: result.difference for result in results} == dict.fromkeys(PATHS)


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe-lite", "qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_moved_tokens_with_a_layer_ahead_are_those_of_transformers(family, tmp_path):
    torch.set_num_threads(1)
    checkpoint = add_mtp_layer(write_tiny_checkpoint(family, tmp_path / "model"))
    (tmp_path / "model-eagle").symlink_to(checkpoint)
    model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
    (result,) = run_paths_of(model, [MOVED], every=4)
    assert result.difference is None
