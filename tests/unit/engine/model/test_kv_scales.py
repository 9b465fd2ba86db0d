"""Scales of float8 KV are found under every name that checkpoints give them, and are no weights."""

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import LoadFormat
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import load_kv_scales
from tandem_engine.model.quantization.kv_scales import scales_digest
from tandem_testing.checkpoint_files import random_tensors, write_config

ATTENTION = "model.layers.1.self_attn"


def scales(directory, added, *, load_format=LoadFormat.AUTO, **config):
    """Of a checkpoint with 2 layers of 2 KV heads."""
    write_config(directory, **config)
    save_file(random_tensors(directory) | added, directory / "model.safetensors")
    return load_kv_scales(directory, read_model_config(directory), load_format=load_format)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_layer_may_have_one_scale_for_k_and_one_for_v(tmp_path, names):
    k, v = (f"{ATTENTION}.{name}" for name in names)
    found = scales(tmp_path, {k: torch.tensor(0.5), v: torch.tensor([0.25], dtype=torch.bfloat16)})
    assert found.tolist() == [[[1.0, 1.0], [1.0, 1.0]], [[0.5, 0.5], [0.25, 0.25]]]


def test_scale_may_be_one_for_each_head_or_one_for_both_sides(tmp_path):
    by_head = {f"{ATTENTION}.k_scale": torch.tensor([[0.5], [2.0]])}
    assert scales(tmp_path, by_head)[1, 0].tolist() == [0.5, 2.0]
    assert scales(tmp_path, {f"{ATTENTION}.kv_scale": torch.tensor(3.0)})[1].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_scales_of_queries_and_weights_are_passed_over(tmp_path):
    added = {f"{ATTENTION}.{name}": torch.tensor(2.0) for name in ("q_scale", "prob_scale", "k_scale")}
    assert scales(tmp_path, added)[1].tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_checkpoint_without_scales_has_none(tmp_path):
    assert scales(tmp_path, {}) is None
    assert scales(tmp_path, {}, load_format=LoadFormat.DUMMY) is None


def test_scales_of_integers_are_not_taken_for_those_of_float8(tmp_path):
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "int", "num_bits": 8}}
    group = {"config_groups": {"0": {"weights": {"num_bits": 8, "strategy": "channel"}}}, "format": "int-quantized"}
    added = {f"{ATTENTION}.k_scale": torch.tensor(0.5)}
    assert scales(tmp_path, added, quantization_config=scheme | group) is None
    scheme["kv_cache_scheme"]["type"] = "float"
    assert scales(tmp_path, added, quantization_config=scheme | group)[1, 0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "value", [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(torch.nan), torch.ones(3), torch.tensor(1)]
)
def test_scale_that_is_none_is_refused_by_name(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"self_attn.k_scale must be one positive number or one for each of 2 KV"):
        scales(tmp_path, {f"{ATTENTION}.k_scale": value})


def test_scale_of_a_layer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.layers.2.self_attn.k_scale is of none of 2 layers"):
        scales(tmp_path, {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)})


def test_kv_scales_have_own_digest_apart_from_fingerprint(tmp_path):
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    for directory in (plain, scaled):
        directory.mkdir()
    scales(plain, {})
    found = scales(scaled, {f"{ATTENTION}.k_scale": torch.tensor(0.5)})
    assert read_model_config(plain).fingerprint == read_model_config(scaled).fingerprint
    assert scales_digest(None) == scales_digest(torch.ones(2, 2, 2)) == ""
    assert len({"", scales_digest(found), scales_digest(found.flip(0))}) == 3
