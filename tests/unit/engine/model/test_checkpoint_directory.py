"""Only files of the model directory are opened."""

import os

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint import read_model_config
from tandem_testing.checkpoint_files import write_checkpoint


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(path)
    return str(caught.value)


def test_absent_directory_is_refused(tmp_path):
    assert f"{tmp_path}/nowhere does not exist" in refusal(tmp_path / "nowhere")


def test_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert "is a file" in refusal(tmp_path / "model.safetensors")


def test_empty_directory_is_refused(tmp_path):
    assert f"no config.json in {tmp_path}" in refusal(tmp_path)


def test_link_out_of_the_directory_is_refused(tmp_path):
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    model.mkdir()
    elsewhere.mkdir()
    write_checkpoint(model)
    os.rename(model / "model.safetensors", elsewhere / "model.safetensors")
    os.symlink(elsewhere / "model.safetensors", model / "model.safetensors")
    assert "link out of the model directory" in refusal(model)


def test_dangling_link_counts_as_absent(tmp_path):
    os.symlink(tmp_path / "nothing", tmp_path / "config.json")
    assert "no config.json" in refusal(tmp_path)


def test_directory_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in refusal(tmp_path)


def test_links_within_the_directory_are_followed(tmp_path):
    """A volume that Kubernetes mounts from a ConfigMap consists of such links."""
    data = tmp_path / "..data"
    data.mkdir()
    write_checkpoint(data)
    for name in ("config.json", "model.safetensors"):
        os.symlink(data / name, tmp_path / name)
    assert read_model_config(tmp_path).num_layers == 2


def test_snapshot_of_a_hugging_face_cache_may_link_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_checkpoint(blobs)
    for name in ("config.json", "model.safetensors"):
        os.symlink(blobs / name, snapshot / name)
    assert read_model_config(snapshot).num_layers == 2
    (snapshot / "config.json").unlink()
    os.symlink("/etc/hostname", snapshot / "config.json")
    assert "link out of the model directory" in refusal(snapshot)


def test_snapshot_may_link_to_blobs_that_its_cache_shares(tmp_path):
    """huggingface_hub keeps files of several repositories once: snapshot -> blobs of the repository -> shared blobs."""
    repository, shared = tmp_path / "models--a--b", tmp_path / "blobs"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    for folder in (blobs, snapshot, shared):
        folder.mkdir(parents=True)
    write_checkpoint(shared)
    for name in ("config.json", "model.safetensors"):
        os.symlink(f"../../blobs/{name}", blobs / name)
        os.symlink(f"../../blobs/{name}", snapshot / name)
    assert "link out of the model directory" in refusal(snapshot)
    (shared / ".huggingface-shared-blobs").write_text("1\n")
    assert read_model_config(snapshot).num_layers == 2
