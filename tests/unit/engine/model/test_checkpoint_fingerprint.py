"""Two workers share KV only when their models have one fingerprint."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.config import ModelConfig
from tandem_engine.config.model import RopeConfig
from tandem_engine.model import checkpoint as fingerprint_module
from tandem_engine.model.checkpoint import read_model_config
from tandem_services.cli.flags import bundled_model
from tandem_testing.checkpoint_files import write_checkpoint, write_config, write_sharded


def fingerprint(directory) -> str:
    return read_model_config(directory).fingerprint


def test_fingerprint_of_equal_weights_is_path_independent(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name)
    assert fingerprint(tmp_path / "first") == fingerprint(tmp_path / "second")


def test_sharding_does_not_change_it(tmp_path):
    tensors = write_checkpoint(tmp_path)
    whole = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_sharded(tmp_path, tensors, shards=3)
    assert fingerprint(tmp_path) == whole


def test_other_weights_of_the_same_shapes_change_it(tmp_path):
    write_checkpoint(tmp_path, seed=0)
    before = fingerprint(tmp_path)
    write_checkpoint(tmp_path, seed=1)
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_change_in_any_one_tensor_changes_it(tmp_path, name):
    tensors = write_checkpoint(tmp_path)
    before = fingerprint(tmp_path)
    save_file({**tensors, name: tensors[name] + 1}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) != before


def test_change_in_the_config_alone_changes_it(tmp_path):
    write_checkpoint(tmp_path)
    before = fingerprint(tmp_path)
    write_config(tmp_path, rope_theta=5e5)
    assert fingerprint(tmp_path) != before


def test_dtype_of_the_files_changes_it(tmp_path):
    tensors = {name: torch.ones_like(tensor) for name, tensor in write_checkpoint(tmp_path).items()}
    prints = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        prints.add(fingerprint(tmp_path))
    assert len(prints) == 3


def test_large_tensor_is_sampled_at_both_ends_and_between(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "BLOCK_BYTES", 16)
    tensors = write_checkpoint(tmp_path)
    prints = {fingerprint(tmp_path)}
    table = tensors["model.embed_tokens.weight"]
    middle = (table.numel() * 4 - 16) // 3 // 4
    for place in (0, middle + 1, 2 * middle + 1, -1):
        changed = table.clone()
        changed.view(-1)[place] += 1
        save_file({**tensors, "model.embed_tokens.weight": changed}, tmp_path / "model.safetensors")
        prints.add(fingerprint(tmp_path))
    assert len(prints) == 5


@dataclass(frozen=True, kw_only=True)
class LaterRope(RopeConfig):
    """As a later release might have it."""

    added: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LaterModel(ModelConfig):
    added: int = 0


def test_fingerprint_of_a_model_stays_with_added_fields():
    config = read_model_config(bundled_model())
    names = {field.name for field in dataclasses.fields(config)}
    rope = LaterRope(**{field.name: getattr(config.rope, field.name) for field in dataclasses.fields(config.rope)})
    later = LaterModel(**{name: getattr(config, name) for name in names - {"rope"}}, rope=rope)
    assert fingerprint_module.fingerprint(later, {}) == fingerprint_module.fingerprint(config, {})
    with_value = dataclasses.replace(later, added=7)
    assert fingerprint_module.fingerprint(with_value, {}) != fingerprint_module.fingerprint(config, {})


def test_fingerprint_of_the_bundled_model_stays():
    """Another one ends the exchange of KV between two releases: only for a reason that the changelog names."""
    assert fingerprint(bundled_model()) == "dd27098acfeac60cae166dcb6a52dfc1"
