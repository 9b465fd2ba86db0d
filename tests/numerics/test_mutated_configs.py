"""config.json field by field against transformers: equal, or refused [config-equal-or-refused].

`make mutate` tries every mutation.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_testing.mutated_configs.__main__ import parsed
from tandem_testing.mutated_configs.comparison import Outcome, compare
from tandem_testing.mutated_configs.mutations import ABSENT, FULL, SLIDING, Mutation, drawn_pairs, mutations
from tandem_testing.mutated_configs.run import run
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

SAMPLED = ("mistral", "gemma3", "qwen3-moe", "cohere2", "glm4-moe", "ministral3", "deepseek-v3")
EVERY = 61
NAMED = {
    "mistral": [
        {"layer_types": [FULL] * 3},
        {"layer_types": [SLIDING, FULL, SLIDING]},
        {"is_causal": False},
        {"some_new_field": 1},
        {"model_type": "llama"},
    ],
    "mixtral": [{"rms_norm_eps": ABSENT}],
    "gemma3": [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 99.0},
    ],
    "gemma4-readers": [
        {"layer_types": [FULL] * 6},
        {"layer_types": [SLIDING] * 6},
        {"layer_types": ABSENT},
        {"num_kv_shared_layers": 5},
        {"num_kv_shared_layers": 6},
        {"attention_k_eq_v": True},
        {"per_layer_config": {"2": {"head_dim": 32}}},
        {"per_layer_config": ABSENT, "global_head_dim": 32},
        {"global_head_dim": 16},
        {"use_double_wide_mlp": False},
        {"hidden_size_per_layer_input": 0},
        {"rope_parameters": ABSENT},
        {"rope_theta": 300.0},
        {"use_bidirectional_attention": "all"},
    ],
    "gpt-oss": [
        {"rope_parameters": ABSENT},
        {"rope_parameters": ABSENT, "rope_theta": 700.0},
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"layer_types": ABSENT, "sliding_window": 8},
        {"swiglu_alpha": 0.7, "swiglu_limit": ABSENT},
        {"attention_bias": False},
        {"num_experts_per_tok": ABSENT},
    ],
    "deepseek-v3": [
        {"head_dim": 8},
        {"num_key_value_heads": 2},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 2.0}},
        {"rope_interleave": False, "rms_norm_eps": 0.5},
        {"topk_group": 1},
        {"num_experts_per_tok": 4, "n_group": 2, "topk_group": 1},
        {"norm_topk_prob": False, "routed_scaling_factor": 0.5},
    ],
    "deepseek-v2-groups": [
        {"topk_method": "greedy"},
        {"norm_topk_prob": True},
        {"n_group": None},
        {"scoring_func": "sigmoid"},
    ],
    "glm4-moe-lite": [{"first_k_dense_replace": 1}, {"rms_norm_eps": ABSENT}],
    "llama4": [
        {"attention_chunk_size": 7},
        {"attention_chunk_size": None, "layer_types": ABSENT},
        {"attention_chunk_size": None},
        {"layer_types": ABSENT, "no_rope_layers": [0, 1, 1]},
        {"layer_types": [FULL] * 3},
        {"layer_types": [SLIDING] * 3},
        {"no_rope_layers": ABSENT, "no_rope_layer_interval": 3},
        {"moe_layers": ABSENT, "interleave_moe_layer_step": 3},
        {"attn_temperature_tuning": False},
        {"attn_scale": 2.0, "floor_scale": 5},
        {"use_qk_norm": False},
        {"num_experts_per_tok": 3},
        {"rms_norm_eps": 0.1},
    ],
    "qwen3-next": [
        {"layer_types": ABSENT, "full_attention_interval": 2},
        {"layer_types": ABSENT, "full_attention_interval": 1},
        {"layer_types": [FULL] * 4},
        {"linear_num_key_heads": 2},
        {"linear_conv_kernel_dim": 1},
        {"partial_rotary_factor": 0.5},
        {"norm_topk_prob": False},
        {"mlp_only_layers": [0, 1, 2, 3]},
    ],
    "qwen3.5": [{"attn_output_gate": False}, {"rms_norm_eps": 0.5}, {"linear_key_head_dim": 20}],
    "llama-bias": [{"attention_chunk_size": 8}, {"rope_scaling": {}, "rope_parameters": {"rope_theta": 300.0}}],
}


@pytest.mark.parametrize("name", NAMED)
def test_field_of_another_model_is_served_or_refused(name, tmp_path):
    path = write_tiny_checkpoint(name, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    for changes in NAMED[name]:
        path.write_text(json.dumps(Mutation(changes=changes).of(config)))
        result = compare(tmp_path)
        assert result.outcome in (Outcome.EQUAL, Outcome.REFUSED), f"{changes}: {result}"


@pytest.mark.parametrize("name", SAMPLED)
def test_mutated_configs_are_equal_or_refused(name, tmp_path):
    results = list(run(name, tmp_path, every=EVERY, first=7))
    faults = [(number, str(mutation), result) for number, mutation, result in results if result.outcome.is_fault]
    assert not faults
    assert len(results) >= 5


def test_pairs_of_mutations_follow_from_seed_and_number():
    config = {"hidden_size": 64, "model_type": "llama", "rope_theta": 300.0}
    pairs = [str(each) for each in drawn_pairs(config, 5, 8)]
    assert pairs == [str(each) for each in drawn_pairs(config, 5, 20)][:8]
    assert pairs != [str(each) for each in drawn_pairs(config, 6, 8)]
    assert not set(pairs) <= {str(each) for each in mutations(config)}


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--every", "0"], "must be at least 1"),
        (["--count", "5"], "--count needs --seed"),
        (["--json", "/absent/counts.json"], "make the folder /absent first"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_a_run(argv, fix, capsys):
    with pytest.raises(SystemExit):
        parsed(argv)
    assert fix in capsys.readouterr().err


def test_stored_head_that_is_not_the_embedding_is_served(tmp_path):
    write_tiny_checkpoint("llama-bias", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(5))
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert compare(tmp_path).outcome is Outcome.EQUAL
