"""Adapters of layers with states: rows of ranks, and what is refused by name."""

from pathlib import Path

import pytest
import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import DeltaConfig
from tandem_engine.model.adapters.checkpoint import open_adapter
from tandem_engine.model.adapters.weights import recurrent_rows
from tandem_engine.model.checkpoint import read_model_config
from tandem_testing.adapters import STATES, read_files, write_adapter, write_files
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

DELTA = DeltaConfig(layers=(0,), key_heads=2, value_heads=4, key_size=3, value_size=5, kernel=4, joined=True)
OUTPUTS = {"qkvz": 52, "ba": 8, "qkv": 32, "z": 20, "b": 4, "a": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("qwen3-next", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_every_row_once(name, size):
    shares = [recurrent_rows(f"linear_attn.in_proj_{name}", DELTA, rank=rank, size=size) for rank in range(size)]
    assert sorted(torch.cat([rows for _, rows in shares]).tolist()) == [*range(OUTPUTS[name])]
    assert len({(outputs.start, outputs.stop) for outputs, _ in shares}) == 1
    assert all(outputs.stop - outputs.start == len(rows) for outputs, rows in shares)


def test_rows_of_a_key_head_stand_part_after_part():
    """Head 1 has q at 26 to 28, then k, then ten of v and ten of z."""
    _, rows = recurrent_rows("linear_attn.in_proj_qkvz", DELTA, rank=0, size=1)
    assert rows[:6].tolist() == [0, 1, 2, 26, 27, 28]
    _, rows = recurrent_rows("linear_attn.in_proj_qkv", DELTA, rank=1, size=2)
    assert rows.tolist() == [3, 4, 5, 9, 10, 11, *range(22, 32)]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("mlp.shared_expert.up_proj", "belongs to an adapter of a shared expert"),
        ("linear_attn.conv1d", "no projection of attention"),
        ("linear_attn.in_proj_qkv", "a projection that the base model does not have"),
    ],
)
def test_other_modules_are_refused_by_name(module, message, checkpoint, tmp_path):
    tensors, fields = read_files(write_adapter(tmp_path, checkpoint, modules=STATES["qwen3-next"], layers=[0]))
    renamed = {name.replace("linear_attn.in_proj_ba", module): tensor for name, tensor in tensors.items()}
    fields = fields | {"target_modules": []}
    with pytest.raises(CheckpointError, match=message):
        open_adapter(write_files(tmp_path, renamed, fields), read_model_config(checkpoint), max_rank=8)


def test_listed_projection_without_tensors_is_refused(checkpoint, tmp_path):
    folder = write_adapter(tmp_path, checkpoint, modules=["out_proj"])
    tensors, fields = read_files(folder)
    write_files(folder, tensors, fields | {"target_modules": ["out_proj", "in_proj_ba"]})
    with pytest.raises(CheckpointError, match="target_modules lists 'in_proj_ba'"):
        open_adapter(folder, read_model_config(checkpoint), max_rank=8)


def test_model_without_states_ignores_what_it_lacks(tmp_path):
    dense = write_tiny_checkpoint("qwen3", tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", dense, modules=["q_proj"])
    tensors, fields = read_files(folder)
    write_files(folder, tensors, fields | {"target_modules": ["q_proj", "out_proj"]})
    assert open_adapter(folder, read_model_config(dense), max_rank=8).rank == 4
