"""gpt-oss: its config.json, and tensors of all experts in one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import Activation, GateClamp, MoeConfig, NormKind, RopeConfig
from tandem_engine.model.checkpoint import open_weights, parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.layers.mlp import gate_first
from tandem_engine.model.quantization.scheme import read_scheme
from tandem_testing.checkpoint_files import write_config
from tandem_testing.mxfp4_files import SCHEME, write_mxfp4
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "quantization_config": SCHEME,
}
"""As openai/gpt-oss-20b has it, with fewer layers."""

YARN = RopeConfig(
    rope_type="yarn", theta=150000.0, factor=32.0, original_max_position=4096, beta_fast=32.0, truncate=False
)


@pytest.fixture
def parse(tmp_path):
    def parse_with(*, without=(), **changes):
        return parse_config(open_directory(write_config(tmp_path, without=without, **changes)))

    return parse_with


def test_published_config_is_parsed_as_model_card_states(parse):
    config = parse(**PUBLISHED)
    assert config.moe == MoeConfig(
        num_experts=32, experts_per_token=4, intermediate_size=2880, normalize=True, bias=True, interleaved=True
    )
    assert (config.rope, config.max_position, config.rms_eps) == (YARN, 131072, 1e-5)
    assert config.windows == (128, None, 128, None)
    assert (config.activation, config.gate_clamp) == (Activation.CLAMPED_SWIGLU, GateClamp(alpha=1.702, limit=7.0))
    assert (config.attention_bias, config.output_bias, config.attention_sinks) == (True, True, True)
    assert (config.norm, config.tie_embeddings) == (NormKind.ROUND_LAST, False)


def test_absent_fields_are_the_defaults_of_transformers(parse):
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta")
    config = parse(**GPT_OSS, num_attention_heads=16, max_position_embeddings=8192, without=absent)
    assert (config.num_kv_heads, config.head_dim, config.rms_eps) == (8, 64, 1e-5)
    assert (config.rope, config.max_position, config.windows) == (YARN, 131072, (128, None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"swiglu_alpha": "x"}, "swiglu_alpha"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method must be mxfp4"),
        ({"quantization_config": {**SCHEME, "block_size": 16}}, "block_size"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(parse, changes, named):
    with pytest.raises(CheckpointError, match=named):
        parse(**{**GPT_OSS, **changes})


def test_mxfp4_of_another_family_is_refused(parse):
    with pytest.raises(CheckpointError, match="quant_method may be mxfp4 only in a GptOssForCausalLM"):
        parse(quantization_config=SCHEME)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt-oss")
    plain = write_tiny_checkpoint("gpt-oss", folder / "plain")
    return write_mxfp4(plain, folder / "packed", worth=folder / "worth")


def opened(path):
    directory = open_directory(path)
    return open_weights(directory, read_scheme(read_fields(directory)), parse_config(directory))


def test_each_expert_is_its_slice_of_stored_tensor(packed):
    stored = load_file(packed.parent / "worth" / "model.safetensors")
    plain, levels = opened(packed.parent / "worth"), opened(packed)
    for name in ("gate_up_proj", "down_proj"):
        for expert in (0, 4):
            expected = stored[f"model.layers.1.mlp.experts.{name}"][expert].t()
            ours = f"model.layers.1.mlp.experts.{expert}.{name}"
            for tensors in (plain, levels):
                matrix = tensors[f"{ours}.weight"]
                assert matrix.shape == expected.shape
                assert torch.equal(matrix.read_part(0, 0, len(expected)), expected)
                assert torch.equal(matrix.read_part(0, 2, 6), expected[2:6])
                assert torch.equal(matrix.read_part(1, 32, 64), expected[:, 32:64])
            bias = stored[f"model.layers.1.mlp.experts.{name}_bias"][expert]
            assert torch.equal(plain[f"{ours}.bias"].read_part(0, 0, len(bias)), bias)


def test_gate_comes_before_up_once_it_is_read():
    outputs = torch.tensor([0, 10, 1, 11, 2, 12])
    assert outputs[gate_first(len(outputs), outputs.device)].tolist() == [0, 1, 2, 10, 11, 12]


LAYER = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"down_proj_scales": (5, 64, 4)}, r"down_proj_scales has shape \[64, 4\]"),
        ({"down_proj_blocks": (5, 64, 3, 8)}, r"down_proj_blocks has blocks of shape \[64, 3, 8\]"),
        ({"down_proj_blocks": (5, 64, 48)}, "no matching|no part of|lack"),
        ({"down_proj_scales": (4, 64, 3)}, "has no matching"),
        ({"down_proj_blocks": (5, 64, 2, 16), "down_proj_scales": (5, 64, 2)}, r"config.json implies \[64, 96\]"),
        ({"gate_up_proj_scales": None}, "has no matching"),
        ({"gate_up_proj_bias": (5, 190)}, r"config.json implies \[192\]"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(packed, tmp_path, changes, named):
    tensors = load_file(packed / "model.safetensors")
    for name, shape in changes.items():
        if shape is None:
            del tensors[f"{LAYER}.{name}"]
        else:
            tensors[f"{LAYER}.{name}"] = torch.ones(shape, dtype=tensors[f"{LAYER}.{name}"].dtype)
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        read_model_config(tmp_path)


def test_exponent_without_a_value_is_refused(packed, tmp_path):
    from tandem_engine.model.loader import load_model

    tensors = load_file(packed / "model.safetensors")
    tensors[f"{LAYER}.down_proj_scales"][3, 0, 0] = 255
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        load_model(tmp_path, read_model_config(tmp_path), torch.float32, progress=False)


def test_packed_experts_without_their_config_are_refused(packed, tmp_path):
    values = json.loads((packed / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lack tensor"):
        read_model_config(tmp_path)
