"""Fields of families whose blocks differ from Llama's: what they mean, and which values are refused by name."""

import math

import pytest

from tandem_engine.base.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.config import (
    ModelConfig,
    NormKind,
    NormPlacement,
    QkNorm,
    QueryScale,
    RopeConfig,
    Scoring,
    SharedExpert,
)
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.layers.attention import attention_scale
from tandem_engine.model.rotary_fields import NO_ROTATION
from tandem_testing.checkpoint_files import write_config

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DIVISORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, **EXPERTS}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 8, "n_routed_experts": 8, **EXPERTS}
ERNIE_MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
}
HUNYUAN = {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 8}
HUNYUAN_MOE = {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2}
MINIMAX = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4}
GLM4 = {"architectures": ["Glm4ForCausalLM"], "head_dim": 8}
GRANITE = {"architectures": ["GraniteForCausalLM"]}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 16,
}
COHERE2 = {"architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 16}
EXAONE4 = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 4}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"rope_type": "longrope", **DIVISORS}
MINISTRAL3 = {
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 8,
    "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 64},
}


@pytest.fixture
def parse(tmp_path):
    def parse_with(*, without=(), **changes) -> ModelConfig:
        return parse_config(open_directory(write_config(tmp_path, without=without, **changes)))

    return parse_with


def test_qwen2_moe_has_biases_and_a_gated_shared_expert(parse):
    config = parse(**QWEN2_MOE, shared_expert_intermediate_size=20)
    assert (config.attention_bias, config.output_bias) == (True, False)
    assert config.moe.shared == SharedExpert(intermediate_size=20, gated=True)
    assert not parse(**QWEN2_MOE, qkv_bias=False).attention_bias


def test_qwen2_moe_slides_in_every_second_of_the_first_layers(parse):
    slides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3, "num_hidden_layers": 4}
    assert parse(**QWEN2_MOE, **slides).windows == (8, None, 8, None)
    assert parse(**QWEN2_MOE, sliding_window=8).windows == ()


def test_glm4_moe_chooses_from_groups_by_sigmoid_and_bias(parse):
    moe = parse(**GLM4_MOE, n_group=4, topk_group=2, n_shared_experts=3, routed_scaling_factor=2.5).moe
    assert (moe.scoring, moe.choice_bias, moe.groups, moe.kept_groups) == (Scoring.SIGMOID, True, 4, 2)
    assert (moe.scale, moe.normalize, moe.float32_router, moe.dense_layers) == (2.5, True, True, (0,))
    assert moe.shared == SharedExpert(intermediate_size=24)


def test_ernie_moe_has_experts_from_one_layer_to_another(parse):
    assert parse(**ERNIE_MOE).moe.dense_layers == (0,)
    between = {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 2}
    assert parse(**ERNIE_MOE, **between).moe.dense_layers == (0, 2, 3)
    assert parse(**ERNIE_MOE, moe_num_shared_experts=0).moe.shared is None


def test_hunyuan_stretches_the_rotary_base_by_alpha(parse):
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    config = parse(**HUNYUAN, rope_scaling=scaling)
    assert config.rope == RopeConfig(theta=pytest.approx(10_000 * 1000 ** (8 / 6)))
    assert config.qk_norm is QkNorm.ROTATED_HEADS


def test_minimax_m2_rotates_as_many_dimensions_as_it_names(parse):
    config = parse(**MINIMAX, rotary_dim=4)
    assert (config.rope.rotary_dim, config.qk_norm) == (4, QkNorm.WHOLE)
    assert parse(**MINIMAX).rope.rotary_dim is None
    assert (config.moe.intermediate_size, config.moe.shared) == (24, None)


def test_olmo3_scales_the_rotation_of_full_layers_alone(parse):
    config = parse(**OLMO3, rope_scaling=YARN, sliding_window=16)
    assert (config.rope.rope_type, config.second_rope) == ("yarn", RopeConfig(theta=5e5))
    assert (config.second_layers, config.windows) == ((0, 1, 2), (16, 16, 16, None))
    assert (config.norm, config.norm_placement) == (NormKind.ROUND_LAST, NormPlacement.AFTER)


def test_glm4_rotates_half_of_a_head_in_pairs(parse):
    config = parse(**GLM4)
    assert (config.rope.rotary_dim, config.rope.interleaved) == (4, True)
    assert (config.attention_bias, config.output_bias) == (True, False)
    assert parse(**GLM4, partial_rotary_factor=1.0).rope.rotary_dim is None


def test_granite_has_four_factors(parse):
    factors = {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    config = parse(**GRANITE, **factors, logits_scaling=8)
    assert (config.attention_scale, config.embedding_scale, config.residual_scale) == (0.25, 12.0, 0.22)
    assert config.logit_scale == 0.125


def test_smollm3_does_not_rotate_in_some_layers(parse):
    config = parse(**SMOLLM3)
    assert (config.second_rope, config.second_layers) == (NO_ROTATION, (3,))
    assert parse(**SMOLLM3, no_rope_layers=[0, 1, 1, 0]).second_layers == (0, 3)
    assert parse(**SMOLLM3, no_rope_layers=[1, 1, 1, 1]).second_rope is None


def test_llama4_defaults_are_those_of_published_files(parse):
    config = parse(**LLAMA4)
    assert (config.second_layers, config.chunks) == ((3,), (16, 16, 16, None))
    assert config.query_scale is not None
    assert parse(**LLAMA4, no_rope_layers=[], attn_temperature_tuning=4) == config
    assert parse(**LLAMA4, attn_temperature_tuning=False).query_scale is None
    with pytest.raises(CheckpointError, match="attn_temperature_tuning"):
        parse(**LLAMA4, attn_temperature_tuning=3)


def test_llama4_without_experts_names_none(parse):
    """As Llama Guard 4 has it."""
    config = parse(**LLAMA4 | {"num_local_experts": 0, "moe_layers": [], "interleave_moe_layer_step": 0})
    assert (config.moe, config.intermediate_size) == (None, 16384)
    with pytest.raises(CheckpointError, match="num_local_experts"):
        parse(**LLAMA4 | {"num_local_experts": 0, "moe_layers": [1]})
    with pytest.raises(CheckpointError, match="interleave_moe_layer_step"):
        parse(**LLAMA4, interleave_moe_layer_step=0)


def test_cohere2_does_not_rotate_in_full_layers(parse):
    config = parse(**COHERE2)
    assert (config.windows, config.second_layers) == ((16, 16, 16, None), (3,))
    assert (config.norm, config.norm_placement, config.logit_scale) == (NormKind.CENTERED, NormPlacement.SHARED, 0.0625)
    assert parse(**COHERE2, layer_norm_eps=0.01).rms_eps == 0.01


def test_exaone4_rotates_in_all_layers_without_a_window(parse):
    config = parse(
        **EXAONE4, sliding_window=16, layer_types=[SLIDING, SLIDING, FULL, FULL], sliding_window_pattern="LLGG"
    )
    assert (config.second_layers, config.windows) == ((2, 3), (16, 16, None, None))
    plain = parse(**EXAONE4, sliding_window=None, layer_types=[FULL] * 4)
    assert (plain.second_rope, plain.windows) == (None, ())


def test_phi3_reads_the_divisors_of_both_contexts(parse):
    config = parse(**PHI3, rope_scaling=LONGROPE, original_max_position_embeddings=16)
    assert (config.rope.short_factors, config.rope.long_factors) == ((1.0, 1.5), (2.0, 3.0))
    assert (config.rope.original_max_position, config.rope.factor, config.max_position) == (16, 4.0, 64)


def test_ministral3_scales_queries_by_their_position(parse):
    config = parse(**MINISTRAL3)
    assert config.query_scale == QueryScale(beta=0.1, period=16)
    assert (config.rope.rope_type, config.max_position) == ("yarn", 64)


def test_head_dim_of_null_is_derived_as_in_transformers(parse):
    assert parse(architectures=["Ernie4_5ForCausalLM"]).head_dim == 128
    assert parse(architectures=["Ernie4_5ForCausalLM"], head_dim=None).head_dim == 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({**GLM4_MOE, "n_group": 3}, "n_group"),
        ({**GLM4_MOE, "n_group": 8}, "n_group"),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 5}, "topk_group"),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
        ({**GLM4_MOE, "n_shared_experts": 0}, "n_shared_experts"),
        ({**GLM4_MOE, "routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({**GLM4, "partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({**GLM4, "partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({**ERNIE_MOE, "moe_layer_interval": 0}, "moe_layer_interval"),
        ({**ERNIE_MOE, "moe_k": 5}, "moe_k"),
        ({**GRANITE, "logits_scaling": 0}, "logits_scaling"),
        ({**GRANITE, "residual_multiplier": -1.0}, "residual_multiplier"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ({**SMOLLM3, "layer_types": [SLIDING] * 4}, "layer_types"),
        ({**QWEN2_MOE, "layer_types": [SLIDING] * 2}, "layer_types"),
        ({**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor"),
        ({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": [1.0, True]}}, "short_factor"),
        ({**MINISTRAL3, "rope_parameters": YARN}, "llama_4_scaling_beta"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(parse, changes, name):
    with pytest.raises(CheckpointError, match=name) as caught:
        parse(**changes)
    assert not isinstance(caught.value, UnsupportedVariantError)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({**HUNYUAN, "rope_scaling": {"type": "linear", "alpha": 2.0, "factor": 1.0}}, "rope_scaling.type"),
        ({**HUNYUAN_MOE, "moe_topk": [2, 2]}, "moe_topk"),
        ({**HUNYUAN, "use_cla": True}, "use_cla"),
        ({**COHERE2, "head_dim": 8}, "head_dim"),
        ({**COHERE2, "use_qk_norm": True}, "use_qk_norm"),
        ({**OLMO3, "rope_theta": 1e4}, "rope_theta"),
        ({**OLMO3, "rope_parameters": YARN}, "rope_parameters"),
        ({**PHI3, "rope_scaling": YARN}, "rope_scaling.rope_type"),
        ({**PHI3, "lm_head_bias": True}, "lm_head_bias"),
        ({**MINISTRAL3, "original_max_position_embeddings": 8}, "original_max_position_embeddings"),
        ({**MINISTRAL3, "rope_parameters": None}, "rope_parameters"),
        ({**MINIMAX, "scoring_func": "softmax"}, "scoring_func"),
        ({"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True}, "use_bias"),
    ],
)
def test_variant_of_another_model_is_deferred_by_name(parse, changes, name):
    with pytest.raises(UnsupportedVariantError, match=name):
        parse(**changes)


def test_default_of_longrope_scales_by_the_ratio_of_contexts(parse):
    rope = parse(**PHI3, rope_scaling=LONGROPE, original_max_position_embeddings=16).rope
    assert attention_scale(rope) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
