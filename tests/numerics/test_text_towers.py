"""The text part of models that take images gives the tokens of the whole model of transformers, or is refused."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.checkpoint_source.examination import examine_config
from tandem_engine.config import ModelImpl
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.families.text_towers import TOWERS
from tandem_testing.exactness import CACHED, run_paths
from tandem_testing.mutated_configs.comparison import Outcome, compare
from tandem_testing.tiny_checkpoints import TOWER_MODELS, write_tiny_checkpoint

FAMILIES = {
    "gemma3-tower": "gemma3_text",
    "gemma4-tower": "gemma4_text",
    "llama4-tower": "llama4_text",
    "mistral3-tower": "ministral3",
    "qwen2-tower": "qwen2",
    "qwen3-tower": "qwen3",
    "qwen3.5-tower": "qwen3_5_text",
    "qwen3.5-moe-tower": "qwen3_5_moe_text",
}


def edit(directory, *, inner=(), without=(), **outer) -> None:
    """Change fields of config.json: outer ones, and `inner` ones of the text part."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **outer}
    values["text_config"] = {**values["text_config"], **dict(inner)}
    for name in without:
        values["text_config"].pop(name, None)
    path.write_text(json.dumps(values))


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(directory, impl=ModelImpl.AUTO)
    return str(caught.value)


@pytest.fixture
def qwen3(tmp_path):
    return write_tiny_checkpoint("qwen3-tower", tmp_path)


@pytest.mark.parametrize("name", TOWER_MODELS)
def test_text_part_is_that_of_transformers(name, tmp_path):
    write_tiny_checkpoint(name, tmp_path)
    result = compare(tmp_path)
    assert (result.outcome, result.impl, result.detail) == (Outcome.EQUAL, ModelImpl.TANDEM, "")
    config = read_model_config(tmp_path)
    assert (config.family, config.text_part) == (FAMILIES[name], True)


def test_every_tower_is_compared():
    assert {TOWER_MODELS[name].config_class for name in FAMILIES} == {
        "Gemma3Config",
        "Gemma4Config",
        "Llama4Config",
        "Mistral3Config",
        "Qwen2_5_VLConfig",
        "Qwen3VLConfig",
        "Qwen3_5Config",
        "Qwen3_5MoeConfig",
    }
    assert len(FAMILIES) == len(TOWERS)


def test_tower_takes_the_paths_of_verify(qwen3):
    assert [result.difference for result in run_paths(qwen3, [CACHED])] == [None]


def test_text_fields_at_the_top_are_read(tmp_path):
    """As Qwen2.5-VL was published; transformers names a rotation in sections otherwise since."""
    write_tiny_checkpoint("qwen2-tower", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    path.write_text(json.dumps({**text, **values}))
    result = compare(tmp_path)
    assert (result.outcome, result.impl) == (Outcome.EQUAL, ModelImpl.TANDEM)


def test_both_namings_of_tensors_are_one_model(qwen3):
    before = read_model_config(qwen3).fingerprint
    tensors = load_file(qwen3 / "model.safetensors")
    renamed = {name.replace("model.language_model.", "language_model.model."): each for name, each in tensors.items()}
    renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    assert renamed.keys() != tensors.keys()
    save_file(renamed, qwen3 / "model.safetensors", metadata={"format": "pt"})
    assert read_model_config(qwen3).fingerprint == before


def test_tensor_that_is_in_no_part_is_refused_by_name(qwen3):
    tensors = load_file(qwen3 / "model.safetensors")
    tensors["model.language_model.layers.0.self_attn.sinks"] = tensors["lm_head.weight"].clone()
    save_file(tensors, qwen3 / "model.safetensors", metadata={"format": "pt"})
    assert "sinks" in refusal(qwen3)


@pytest.mark.parametrize(
    ("outer", "inner", "name"),
    [
        ({"some_new_field": 1}, {}, "some_new_field"),
        ({}, {"some_new_field": 1}, "text_config.some_new_field"),
        ({}, {"model_type": "gemma3_text"}, "text_config.model_type"),
        ({}, {"sliding_window": 8}, "text_config.sliding_window"),
        ({}, {"num_attention_heads": 0}, "text_config.num_attention_heads"),
        ({"model_type": "gemma3"}, {}, "model_type"),
        ({"tie_word_embeddings": 1}, {}, "tie_word_embeddings"),
    ],
)
def test_field_that_may_concern_text_is_refused_by_name(qwen3, outer, inner, name):
    edit(qwen3, inner=inner, **outer)
    with pytest.raises(CheckpointError, match=name):
        read_model_config(qwen3, impl=ModelImpl.TANDEM)


def test_no_text_part_is_left_to_transformers(qwen3):
    edit(qwen3, inner={"some_new_field": 1})
    message = refusal(qwen3)
    assert "text_config.some_new_field" in message
    assert "transformers does not compute the text part" in message


def test_examination_before_a_start_reads_the_text_part(qwen3):
    assert examine_config(qwen3, impl=ModelImpl.AUTO)
    edit(qwen3, inner={"some_new_field": 1})
    with pytest.raises(CheckpointError, match=r"text_config\.some_new_field"):
        examine_config(qwen3, impl=ModelImpl.AUTO)


def test_gemma3_has_the_sizes_that_published_files_leave_out(tmp_path):
    write_tiny_checkpoint("gemma3-tower", tmp_path)
    edit(tmp_path, without=("vocab_size", "num_attention_heads", "max_position_embeddings"))
    assert "embed_tokens.weight has shape [259, 64]; config.json implies [262208, 64]" in refusal(tmp_path)
