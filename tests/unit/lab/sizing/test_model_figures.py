"""Figures of a model from its config.json."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_lab.sizing.model_figures import read_model_figures

MINI = Path(__file__).parents[4] / "models" / "tandem-mini"
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_parameters_are_those_of_the_weights():
    figures = read_model_figures(MINI)
    stored = 0
    for shard in MINI.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 not a dict
                matrix = weights.get_slice(name).get_shape()
                stored += matrix[0] * matrix[1] if len(matrix) == 2 else 0
    assert figures.parameters == stored


def test_file_and_folder_are_the_same_model():
    assert read_model_figures(MINI / "config.json") == read_model_figures(MINI)


def test_experts_that_are_not_chosen_compute_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    figures = read_model_figures(tmp_path)
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 billion of them for a token; embeddings are looked up.
    assert figures.parameters == pytest.approx(46.7e9, rel=0.01)
    assert figures.active_parameters == pytest.approx(12.9e9, rel=0.02)
    assert figures.kv_bytes == 2 * 32 * 8 * 128 * 2


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--model .*no config\.json there"):
        read_model_figures(tmp_path)


def test_damaged_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError):
        read_model_figures(tmp_path)
