"""config.json is parsed with a bound on everything and an error that names field and value."""

import json

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig, QkNorm, RopeConfig
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_testing.checkpoint_files import write_config

QWEN2, QWEN3 = {"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def parse(tmp_path):
    def parse_with(*, without=(), **changes) -> ModelConfig:
        return parse_config(open_directory(write_config(tmp_path, without=without, **changes)))

    return parse_with


@pytest.fixture
def refusal(parse, tmp_path):
    def refusal_of(**changes) -> str:
        with pytest.raises(CheckpointError) as caught:
            parse(**changes)
        assert str(tmp_path / "config.json") in str(caught.value)
        return str(caught.value)

    return refusal_of


def test_llama_config_is_understood(parse):
    assert parse() == ModelConfig(
        family="llama",
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position=64,
        rms_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=False,
        dtype="float32",
    )


def test_llama_biases_are_read_from_the_config(parse):
    config = parse(attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_qwen2_always_has_a_bias_on_q_k_and_v_alone(parse):
    config = parse(**QWEN2)
    assert (config.family, config.attention_bias, config.output_bias) == ("qwen2", True, False)
    assert not config.qk_norm


def test_qwen3_norms_q_and_k_and_has_heads_of_128_by_default(parse):
    config = parse(**QWEN3)
    assert (config.family, config.qk_norm, config.head_dim) == ("qwen3", QkNorm.HEADS, 128)
    assert parse(**QWEN3, head_dim=32).head_dim == 32


def test_null_means_absent(parse):
    config = parse(head_dim=None, num_key_value_heads=None, rope_scaling=None, eos_token_id=None)
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (4, 4, ())


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_found_under_both_names(parse, name):
    assert parse(**{"dtype": None, name: "bfloat16"}).dtype == "bfloat16"


def test_remote_code_is_ignored(parse):
    assert parse(auto_map={"AutoModelForCausalLM": "evil.Model"}).family == "llama"


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, '{"hidden_size": Infinity}'])
def test_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parse_config(open_directory(tmp_path))


def test_huge_config_is_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"x": "y" * (1 << 20)}))
    with pytest.raises(CheckpointError, match="at most"):
        parse_config(open_directory(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 10**12, 2**70, 1.5, "16", True, [16]])
def test_size_out_of_bounds_or_of_another_type_is_refused(refusal, name, value):
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message


def test_deeply_nested_value_is_rejected_with_short_message(refusal):
    nested: object = 1
    for _ in range(300):
        nested = [nested]
    assert len(refusal(hidden_size=nested)) < 500


def test_missing_size_is_refused(refusal):
    assert "hidden_size is missing" in refusal(without=("hidden_size",))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"hidden_size": 12}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"dtype": "float8"}, "dtype"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"architectures": "GPT2LMHeadModel"}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": [{"x": 1}]}, "architectures"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(refusal, changes, name):
    assert name in refusal(**changes)


def test_both_spellings_of_rotary_parameters_mean_the_same(parse):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    before = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    since = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert before == since
    assert before.rope == RopeConfig(rope_type="llama3", theta=5e5, factor=8.0, original_max_position=32)


def test_oldest_spelling_calls_the_kind_type(parse):
    assert parse(rope_scaling={"type": "linear", "factor": 2}).rope.rope_type == "linear"


def test_dynamic_context_ends_where_scaling_begins(parse):
    """Beyond it transformers' angles depend on the longest sequence of a call."""
    assert parse(rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 64
    assert parse(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}).max_position == 64


def test_scaling_extends_the_context_as_its_kind_defines(parse):
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    assert parse(rope_scaling={"type": "linear", "factor": 2.5}).max_position == 160
    assert parse(rope_scaling={"type": "llama3", "factor": 8.0, **llama3}).max_position == 64
    assert parse(rope_scaling={"type": "yarn", "factor": 4.0}).max_position == 256
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert parse(rope_scaling=yarn).max_position == 64


def test_yarn_infers_its_factor_from_the_two_lengths(parse):
    rope = parse(rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 16}).rope
    assert rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1e9}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
            "rope_parameters.high_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": "llama3"}, "rope_parameters"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        (
            {"max_position_embeddings": 1 << 20, "rope_scaling": {"type": "linear", "factor": 4096}},
            "max_position_embeddings",
        ),
    ],
)
def test_unknown_or_out_of_bounds_rope_parameters_are_rejected(refusal, changes, name):
    assert name in refusal(**changes)


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
def test_sliding_window_is_read_for_the_layers_that_have_one(parse, family):
    assert parse(**family, use_sliding_window=True, sliding_window=32, max_window_layers=1).windows == (None, 32)
    kinds = ["sliding_attention", "full_attention"]
    assert parse(**family, use_sliding_window=True, sliding_window=32, layer_types=kinds).windows == (32, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 32, "layer_types": ["full_attention"] * 2},
    ],
)
def test_sliding_window_that_never_binds_costs_nothing(parse, changes):
    assert parse(**QWEN2, **changes).windows == ()


@pytest.mark.parametrize("kinds", [["linear_attention"] * 2, ["full_attention"], [3, 4], "sliding_attention"])
def test_unknown_or_miscounted_layer_types_are_rejected(refusal, kinds):
    assert "layer_types" in refusal(**QWEN3, layer_types=kinds)
