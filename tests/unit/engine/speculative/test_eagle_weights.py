"""What is no head of this model is refused with a sentence, before anything is computed."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.speculative.eagle import load_head, read_head_config
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def facts(target):
    return read_model_config(target)


@pytest.fixture
def head(target, tmp_path):
    return write_tiny_head(target, tmp_path / "head")


def test_head_is_read_as_it_was_written(head, facts):
    config = read_head_config(str(head), facts)
    loaded = load_head(str(head), config, dtype=torch.float32, device="cpu", positions=64)
    stored = load_file(head / "model.safetensors")
    assert torch.equal(loaded.norm.weight, stored["model.norm.weight"])
    x = torch.randn(3, 2 * facts.hidden_size)
    torch.testing.assert_close(loaded.fc(x), x @ stored["fc.weight"].T)
    assert loaded.rotary.at(torch.tensor([63])) is not None


def test_head_for_other_hidden_states_is_refused(head, facts):
    with pytest.raises(CheckpointError, match="hidden states of 64, the model's have 128"):
        read_head_config(str(head), replace(facts, hidden_size=128))


def test_whole_model_is_no_head(target, facts):
    with pytest.raises(CheckpointError, match=r"3 layers.*DRAFT a whole model"):
        read_head_config(str(target), facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks tensor fc\\.weight"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(1)}), "'extra.weight' is no part"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"norm\.weight has shape \[3\]"),
    ],
)
def test_tensors_are_those_of_a_head(head, facts, change, message):
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_head_config(str(head), facts)


def test_empty_folder_is_no_head(tmp_path, facts):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_head_config(str(tmp_path), facts)


def test_folder_without_weights_is_no_head(head, facts, tmp_path):
    shutil.copytree(head, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    assert json.loads((tmp_path / "other" / "config.json").read_text())["num_hidden_layers"] == 1
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_head_config(str(tmp_path / "other"), facts)


def test_draft_head_of_unsupported_family_is_rejected(facts, tmp_path):
    head = write_tiny_head(write_tiny_checkpoint("cohere2", tmp_path / "target"), tmp_path / "head")
    with pytest.raises(CheckpointError, match="a block of the family cohere2, which is not supported as a head"):
        read_head_config(str(head), facts)
