"""Names of families are ours once they are read; joined projections are ranges of rows, quantized ones too."""

import torch
from safetensors.torch import save_file

from tandem_engine.model.checkpoint import open_weights, parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.quantization.dequantized import DequantizedRows
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_engine.model.tensor_names import expected_shapes
from tandem_testing.checkpoint_files import random_tensors, write_config
from tandem_testing.quantized_files import KINDS

QKV = ("q_proj", "k_proj", "v_proj")
LAYER = "model.layers.0."


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The projections of each layer as Phi-3 stores them."""
    result = dict(tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        parts = [result.pop(f"{prefix}self_attn.{name}.weight") for name in QKV]
        result[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [result.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
        result[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(parts)
    return result


def weights_in(path):
    directory = open_directory(path)
    return open_weights(directory, read_scheme(read_fields(directory)), parse_config(directory))


def test_joined_projections_are_read_as_ranges_of_rows(tmp_path):
    write_config(tmp_path, architectures=["Phi3ForCausalLM"])
    tensors = random_tensors(tmp_path)
    save_file(joined(tensors), tmp_path / "model.safetensors")
    found = weights_in(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.read_part(0, 0, tensor.shape[0]), tensors[name]), name
    v_proj = found[f"{LAYER}self_attn.v_proj.weight"]
    assert torch.equal(v_proj.read_part(0, 3, 5), tensors[f"{LAYER}self_attn.v_proj.weight"][3:5])
    assert sum(tensor.size for tensor in found.values()) == sum(tensor.nbytes for tensor in tensors.values())


def test_joined_matrix_of_other_rows_keeps_its_name(tmp_path):
    write_config(tmp_path, architectures=["Phi3ForCausalLM"])
    tensors = joined(random_tensors(tmp_path))
    name = f"{LAYER}self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert name in weights_in(tmp_path)


def test_joined_projections_stay_quantized(tmp_path):
    write_config(tmp_path, architectures=["Phi3ForCausalLM"])
    plain = joined(random_tensors(tmp_path))
    matrix = f"{LAYER}self_attn.qkv_proj"
    quantize, scheme = KINDS["int-quantized"]
    quantized = quantize(plain.pop(f"{matrix}.weight"), 0)
    stored = {f"{matrix}.{suffix}": part for suffix, part in quantized.parts.items()}
    save_file(plain | stored, tmp_path / "model.safetensors")
    write_config(tmp_path, architectures=["Phi3ForCausalLM"], quantization_config=scheme)
    found = [weights_in(tmp_path)[f"{LAYER}self_attn.{name}.weight"] for name in QKV]
    assert all(isinstance(part, DequantizedRows) for part in found)
    assert torch.equal(torch.cat([part.levels().values() for part in found]), quantized.worth)
    assert torch.equal(found[1].read_part(0, 2, 4), quantized.worth[18:20])


def test_norms_of_glm4_have_each_others_names(tmp_path):
    write_config(tmp_path, architectures=["Glm4ForCausalLM"], head_dim=8)
    theirs = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    tensors = random_tensors(tmp_path)
    published = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        published[name.replace(part, theirs.get(part, part))] = tensor
    save_file(published, tmp_path / "model.safetensors")
    for name, tensor in weights_in(tmp_path).items():
        assert torch.equal(tensor.read_part(0, 0, tensor.shape[0]), tensors[name]), name


def test_layers_beyond_the_last_are_skipped(tmp_path):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    write_config(tmp_path, architectures=["Glm4MoeForCausalLM"], **experts)
    tensors = random_tensors(tmp_path)
    last = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
    extra = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in last.items()}
    save_file({**tensors, **extra, "model.layers.2.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    assert weights_in(tmp_path).keys() == expected_shapes(config).keys()
