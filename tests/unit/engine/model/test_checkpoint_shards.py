"""An index and its shards must agree to the tensor."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_files import open_tensors
from tandem_engine.model.checkpoint_folder import INDEX, open_directory
from tandem_testing.checkpoint_files import write_index, write_sharded


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")}


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_tensors(open_directory(directory))
    return str(caught.value)


def test_shards_are_read_as_one(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    stored = open_tensors(open_directory(tmp_path))
    assert {name: tensor.read().tolist() for name, tensor in stored.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_single_file_wins_over_an_index(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    save_file({"single": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_tensors(open_directory(tmp_path))) == ["single"]


def test_absent_shard_is_refused(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    (tmp_path / "model-1.safetensors").unlink()
    message = refusal(tmp_path)
    assert "no model-1.safetensors" in message
    assert INDEX in message


def test_tensor_in_two_shards_is_refused(tmp_path, tensors):
    write_sharded(tmp_path, tensors)
    for first, second in (("0", "1"), ("1", "0")):
        write_sharded(tmp_path, tensors)
        own = {name: t for i, (name, t) in enumerate(tensors.items()) if str(i % 2) == second}
        stolen = "a" if first == "0" else "b"
        save_file({**own, stolen: tensors[stolen]}, tmp_path / f"model-{second}.safetensors")
        message = refusal(tmp_path)
        assert f"'{stolen}' stands in two shards" in message
        assert "model-0.safetensors" in message
        assert "model-1.safetensors" in message


def test_tensor_listed_but_missing_in_shard_is_rejected(tmp_path, tensors):
    weight_map = write_sharded(tmp_path, tensors)
    write_index(tmp_path, {**weight_map, "ghost": "model-0.safetensors"})
    assert "'ghost' into 'model-0.safetensors', which lacks it" in refusal(tmp_path)


def test_tensor_in_shard_other_than_indexed_is_rejected(tmp_path, tensors):
    weight_map = write_sharded(tmp_path, tensors)
    write_index(tmp_path, {**weight_map, "a": "model-1.safetensors"})
    assert "'a' into 'model-1.safetensors', which lacks it" in refusal(tmp_path)


def test_tensor_the_index_does_not_know_is_refused(tmp_path, tensors):
    weight_map = write_sharded(tmp_path, tensors)
    del weight_map["c"]
    write_index(tmp_path, weight_map)
    assert "'c'" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b"])
def test_index_cannot_lead_out_of_the_directory(tmp_path, tensors, name):
    model = tmp_path / "model"
    model.mkdir()
    save_file(tensors, tmp_path / "secret.safetensors")
    write_index(model, {"a": name})
    message = refusal(model)
    assert "only plain file names" in message
    assert INDEX in message


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 5}, {"a": None}])
def test_weight_map_of_another_shape_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    assert INDEX in refusal(tmp_path)


def test_index_that_names_a_tensor_twice_is_refused(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert "'a' stands twice" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_never_read(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({}))
    message = refusal(tmp_path)
    assert name in message
    assert "safetensors" in message


def test_directory_without_weights_is_refused(tmp_path):
    assert f"in {tmp_path}" in refusal(tmp_path)
