"""Each family's config.json, as published and as transformers 5 writes it, means what transformers takes it to mean."""

import math

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import Activation, ModelConfig, MoeConfig, NormKind, NormPlacement, RopeConfig
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_testing.checkpoint_files import write_config

MISTRAL = {"architectures": ["MistralForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
LONG = {"max_position_embeddings": 8192}
"""More than the windows that families have by default."""


@pytest.fixture
def parse(tmp_path):
    def parse_with(*, without=(), **changes) -> ModelConfig:
        return parse_config(open_directory(write_config(tmp_path, without=without, **changes)))

    return parse_with


@pytest.fixture
def refusal(parse):
    def refusal_of(**changes) -> str:
        with pytest.raises(CheckpointError) as caught:
            parse(**changes)
        return str(caught.value)

    return refusal_of


def test_mistral_slides_in_every_layer(parse):
    assert parse(**MISTRAL, sliding_window=32).windows == (32, 32)
    assert parse(**MISTRAL, sliding_window=64).windows == ()


def test_mistral_window_defaults_if_absent_and_null_disables(parse):
    assert parse(**MISTRAL, **LONG).windows == (4096, 4096)
    assert parse(**MISTRAL, **LONG, sliding_window=None).windows == ()


def test_mixtral_has_experts_everywhere_and_a_larger_rotary_base(parse):
    config = parse(**MIXTRAL)
    assert config.moe == MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=24, normalize=True)
    assert (config.rope.theta, config.windows) == (1e6, ())
    assert parse(**MIXTRAL, sliding_window=16).windows == (16, 16)


def test_qwen3_moe_reads_both_spellings_of_the_number_of_experts(parse):
    expected = MoeConfig(num_experts=16, experts_per_token=4, intermediate_size=12, normalize=False)
    assert parse(**QWEN3_MOE).moe == expected
    assert parse(**{**QWEN3_MOE, "num_experts": None}, num_local_experts=16).moe == expected
    assert parse(**QWEN3_MOE, norm_topk_prob=True).moe.normalize


def test_qwen3_moe_config_selects_dense_layers(parse):
    assert parse(**QWEN3_MOE, mlp_only_layers=[1]).moe.dense_layers == (1,)
    assert parse(**QWEN3_MOE, decoder_sparse_step=2, num_hidden_layers=4).moe.dense_layers == (0, 2)


def test_qwen3_moe_slides_in_all_layers_or_in_none(parse):
    assert parse(**QWEN3_MOE, sliding_window=16).windows == ()
    assert parse(**QWEN3_MOE, sliding_window=16, use_sliding_window=True).windows == (16, 16)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts"),
        ({**MIXTRAL, "num_local_experts": 10**6}, "num_local_experts"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({**MIXTRAL, "sliding_window": 0}, "sliding_window"),
        ({**QWEN3_MOE, "moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({**QWEN3_MOE, "mlp_only_layers": [2]}, "mlp_only_layers"),
        ({**QWEN3_MOE, "mlp_only_layers": [True]}, "mlp_only_layers"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**MISTRAL, "sliding_window": "all"}, "sliding_window"),
        ({**MISTRAL, "sliding_window": 1 << 40}, "sliding_window"),
        ({**MISTRAL, "hidden_act": "gelu"}, "hidden_act"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation"),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**GEMMA2, "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ({**GEMMA2, "final_logit_softcapping": -30.0}, "final_logit_softcapping"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({**GEMMA3, "rope_local_base_freq": 0}, "rope_local_base_freq"),
        ({**GEMMA3, "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        (
            {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "mrope"}}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_scaling": {"factor": 8}},
            "rope_scaling",
        ),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(refusal, changes, name):
    assert name in refusal(**changes)


def test_gemma2_defaults_to_alternating_windows_and_soft_caps(parse):
    config = parse(**GEMMA2, **LONG)
    assert config.windows == (4096, None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    uncapped = parse(**GEMMA2, **LONG, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (None, None)


def test_gemma2_config_sets_scales_activation_and_norms(parse):
    config = parse(**GEMMA2, query_pre_attn_scalar=144)
    assert config.embedding_scale == 4.0
    assert config.attention_scale == pytest.approx(1 / 12)
    assert parse(**GEMMA2).attention_scale == 1 / 16
    assert (config.activation, config.norm) == (Activation.GELU_TANH, NormKind.UNIT_OFFSET)
    assert config.norm_placement is NormPlacement.AROUND
    assert config.tie_embeddings
    assert not parse(**GEMMA2, tie_word_embeddings=False).tie_embeddings


def test_gemma3_has_a_full_layer_after_five_with_a_window(parse):
    config = parse(**GEMMA3, sliding_window=32)
    assert config.windows == (32,) * 5 + (None, 32)
    assert config.second_layers == (0, 1, 2, 3, 4, 6)
    assert config.qk_norm
    assert config.attention_soft_cap is None
    assert parse(**GEMMA3, sliding_window=32, sliding_window_pattern=2).second_layers == (0, 2, 4, 6)


def test_gemma3_window_layers_rotate_equally_in_short_context(parse):
    config = parse(**GEMMA3, sliding_window=4096)
    assert config.windows == ()
    assert config.second_layers == (0, 1, 2, 3, 4, 6)


def test_gemma3_rope_is_equal_in_old_and_new_config_format(parse):
    published = parse(
        **GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    rope_parameters = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    since = parse(**GEMMA3, rope_parameters=rope_parameters)
    assert published == since
    assert published.rope == RopeConfig(rope_type="linear", theta=5e5, factor=8.0)
    assert published.second_rope == RopeConfig(theta=2e4)


def test_gemma3_rotary_bases_have_defaults(parse):
    config = parse(**GEMMA3)
    assert (config.rope.theta, config.second_rope.theta) == (1e6, 1e4)
    assert math.isclose(config.embedding_scale, 4.0)
