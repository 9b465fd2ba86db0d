"""config.json and tensors of families whose layers keep states."""

import dataclasses
from pathlib import Path

import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError, UnsupportedVariantError
from tandem_engine.config import DeltaConfig, ModelConfig, NormKind, SharedExpert
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.registry import require_family
from tandem_engine.model.families.text_towers import text_part
from tandem_engine.model.tensor_names import expected_shapes
from tandem_engine.model.weights import require_shareable

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Qwen3-Next 80B-A3B, as published."""

QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "text_config": {
        **{name: value for name, value in QWEN3_NEXT.items() if "expert" not in name and "sparse" not in name},
        "architectures": None,
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "moe_intermediate_size": None,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "norm_topk_prob": None,
        "partial_rotary_factor": None,
        "rope_theta": None,
        "router_aux_loss_coef": None,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27},
}


def parse(values: dict[str, object], **changed: object) -> ModelConfig:
    fields = text_part(ConfigFields(path=Path("config.json"), values={**values, **changed}))
    return require_family(fields).parse(fields)


def test_published_qwen3_next_has_three_states_to_one_attention():
    config = parse(QWEN3_NEXT)
    assert config.delta == DeltaConfig(
        layers=tuple(layer for layer in range(48) if layer % 4 != 3),
        key_heads=16,
        value_heads=32,
        key_size=128,
        value_size=128,
        kernel=4,
        joined=True,
    )
    assert config.paged_layers == tuple(range(3, 48, 4))
    assert (config.norm, config.output_gate, config.rope.rotary_dim) == (NormKind.UNIT_OFFSET, True, 64)
    assert config.moe is not None
    assert config.moe.shared == SharedExpert(intermediate_size=512, gated=True)
    assert config.moe.normalize


def test_text_part_of_qwen3_5_has_one_rotation_and_no_experts():
    values = {**QWEN3_5, "text_config": {k: v for k, v in QWEN3_5["text_config"].items() if v is not None}}
    config = parse(values)
    assert (config.family, config.moe, config.rope.rotary_dim) == ("qwen3_5_text", None, 64)
    assert config.delta is not None
    assert not config.delta.joined


def test_layer_types_win_over_the_interval():
    kinds = ["full_attention", "linear_attention"] * 24
    assert parse(QWEN3_NEXT, layer_types=kinds).paged_layers == tuple(range(0, 48, 2))


def test_layers_of_full_attention_alone_keep_no_state():
    config = parse(QWEN3_NEXT, full_attention_interval=1)
    assert config.delta is None
    assert config.output_gate


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types may name only full_attention and linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must name a kind for each of the 48 layers and names 1"),
        ({"layer_types": ["linear_attention"] * 48}, "layer_types must leave at least one layer of 48"),
        ({"full_attention_interval": 49}, "full_attention_interval must leave at least one layer of 48"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"num_experts": 0}, "num_experts"),
    ],
)
def test_field_out_of_bounds_is_refused_by_its_name(changed, message):
    with pytest.raises(CheckpointError, match=message):
        parse(QWEN3_NEXT, **changed)


def test_attention_without_its_gate_is_deferred():
    fields = {**QWEN3_5["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "attn_output_gate": False}
    with pytest.raises(UnsupportedVariantError, match="attn_output_gate"):
        parse({name: value for name, value in fields.items() if value is not None})


def test_shapes_are_those_of_two_kinds_of_layers():
    shapes = expected_shapes(parse(QWEN3_NEXT, num_hidden_layers=4, num_experts=16))
    assert shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (12288, 2048)
    assert shapes["model.layers.0.linear_attn.conv1d_v.weight"] == (4096, 1, 4)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes
    assert "model.layers.3.linear_attn.A_log" not in shapes


def test_ranks_that_do_not_divide_the_key_heads_are_refused():
    config = dataclasses.replace(parse(QWEN3_NEXT), delta=dataclasses.replace(parse(QWEN3_NEXT).delta, key_heads=2))
    require_shareable(config, 2)
    with pytest.raises(ConfigError, match="the 2 key heads of layers with states; it can be 1, 2"):
        require_shareable(config, 4)
