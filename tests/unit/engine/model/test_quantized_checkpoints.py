"""Quantized checkpoints give the numbers they stand for, or are refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint import open_weights, parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_testing.checkpoint_files import COMPUTED, write_checkpoint, write_config
from tandem_testing.quantized_files import KINDS, write_quantized

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def opened(path):
    directory = open_directory(path)
    return open_weights(directory, read_scheme(read_fields(directory)), parse_config(directory))


def generated(path) -> tuple[int, ...]:
    with LLM(path, progress=False, num_pages=16, page_size=4, dtype="float32") as llm:
        (answer,) = llm.generate([[1, 2, 3, 4]], GREEDY, use_tqdm=False)
        return tuple(answer.outputs[0].token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_matrices_equal_their_stored_parts(tmp_path, kind):
    _, worths = write_quantized(tmp_path, kind)
    tensors = opened(tmp_path)
    assert tensors.keys() == worths.keys()
    for name, expected in worths.items():
        tensor = tensors[name]
        assert tensor.shape == expected.shape
        assert torch.equal(tensor.read_part(0, 0, len(expected)), expected), name
        assert torch.equal(tensor.read_part(0, 1, 3), expected[1:3]), name


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_columns_of_a_matrix(tmp_path, kind):
    _, worths = write_quantized(tmp_path, kind)
    name = f"{Q_PROJ}.weight"
    assert torch.equal(opened(tmp_path)[name].read_part(1, 8, 16), worths[name][:, 8:16])


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized", "fp8"])
def test_quantized_engine_equals_engine_of_plain_weights(tmp_path, kind):
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    plain.mkdir()
    quantized.mkdir()
    _, worths = write_quantized(quantized, kind, **COMPUTED)
    write_config(plain, **COMPUTED)
    save_file({name: worth.contiguous() for name, worth in worths.items()}, plain / "model.safetensors")
    assert generated(quantized) == generated(plain)


def test_gptq_format_version_changes_the_fingerprint(tmp_path):
    """gptq and gptq_v2 differ by one in every zero point, and in nothing that the files hold."""
    write_quantized(tmp_path, "gptq")
    first = read_model_config(tmp_path).fingerprint
    change(tmp_path, checkpoint_format="gptq_v2")
    assert read_model_config(tmp_path).fingerprint != first


def test_other_scales_are_another_model(tmp_path):
    held, _ = write_quantized(tmp_path, "awq")
    first = read_model_config(tmp_path).fingerprint
    held[f"{Q_PROJ}.scales"] += 1
    save_file(held, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).fingerprint != first


def change(path, **changes) -> None:
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quantization_config.quant_method must be one of awq, gptq"),
        ("awq", {"bits": 8}, "quantization_config.bits"),
        ("awq", {"version": "gemv"}, "quantization_config.version"),
        ("awq", {"zero_point": False}, "quantization_config.zero_point"),
        ("awq", {"group_size": 0}, "quantization_config.group_size"),
        ("awq", {"group_size": 5}, "group_size 5"),
        ("awq", {"group_size": 4}, r"qzeros has shape \[3, 2\]; .* imply \[6, 2\]"),
        ("gptq", {"bits": 3}, "quantization_config.bits must be 2, 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format"),
        ("gptq", {"bits": 8}, "12 inputs, which are no whole number of groups"),
        ("fp8", {"fmt": "e5m2"}, "quantization_config.fmt"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ("fp8", {"weight_block_size": [8, 8]}, "weight_scale_inv has shape"),
        ("int-quantized", {"format": "marlin-24"}, "quantization_config.format"),
        ("int-quantized", {"config_groups": {}}, "config_groups must have one group"),
    ],
)
def test_unreadable_quantization_is_rejected_by_name(tmp_path, kind, changes, named):
    write_quantized(tmp_path, kind)
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"num_bits": 3}, "weights.num_bits"),
        ({"strategy": "block"}, "weights.strategy"),
        ({"type": "float"}, "weights.type must be int for packed weights"),
        ({"group_size": 7}, "group_size 7"),
    ],
)
def test_schemes_of_compressed_tensors_are_refused_by_field(tmp_path, weights, named):
    write_quantized(tmp_path, "pack-quantized")
    group = KINDS["pack-quantized"][1]["config_groups"]["group_0"]
    change(tmp_path, config_groups={"group_0": group | {"weights": group["weights"] | weights}})
    with pytest.raises(CheckpointError, match=named):
        read_model_config(tmp_path)


@pytest.mark.parametrize("block", [None, [128], [0, 128], "128x128"])
def test_invalid_block_structure_is_rejected_by_name(tmp_path, block):
    write_quantized(tmp_path, "float-quantized, blocks")
    group = KINDS["float-quantized, blocks"][1]["config_groups"]["group_0"]
    change(tmp_path, config_groups={"group_0": group | {"weights": group["weights"] | {"block_structure": block}}})
    with pytest.raises(CheckpointError, match=r"weights\.block_structure"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("awq", "qzeros"), ("gptq", "scales"), ("pack-quantized", "weight_scale"), ("fp8", "weight")]
)
def test_missing_part_is_named(tmp_path, kind, suffix):
    held, _ = write_quantized(tmp_path, kind)
    del held[f"{Q_PROJ}.{suffix}"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.{suffix}"):
        read_model_config(tmp_path)


def test_group_indices_beyond_the_groups_are_refused(tmp_path):
    held, _ = write_quantized(tmp_path, "gptq")
    held[f"{Q_PROJ}.g_idx"][3] = 99
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="group indices go from 0 to 99; it has 2 groups"):
        opened(tmp_path)[f"{Q_PROJ}.weight"].read_part(0, 0, 16)


def test_integers_without_a_scheme_are_no_weights(tmp_path):
    tensors = write_checkpoint(tmp_path, **COMPUTED)
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is int8; weights are float32"):
        read_model_config(tmp_path)
