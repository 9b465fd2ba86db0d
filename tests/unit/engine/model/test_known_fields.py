"""config.json is a closed world: a family reads a field, knows that it has no effect, or does not serve the model."""

import dataclasses
from collections import UserDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.config import ModelConfig
from tandem_engine.model.checkpoint import parse_config, read_model_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.gemma4 import GEMMA4
from tandem_engine.model.families.recurrent import RECURRENT_FAMILIES
from tandem_engine.model.families.registry import FAMILIES
from tandem_engine.model.known_fields import IDENTITY, NO_EFFECT, ONE_VALUE
from tandem_testing.checkpoint_files import CONFIG, random_tensors, write_config
from tandem_testing.mutated_configs.mutations import mutations

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "n_routed_experts": 16, "n_shared_experts": 1, **EXPERTS}
NEEDED = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "qwen2_moe": {"num_experts": 4, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 4, **EXPERTS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"head_dim": 4, "layer_norm_eps": 1e-5},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "qwen3_next": {"full_attention_interval": 2, "num_experts": 4, **EXPERTS},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2, "num_experts": 4, **EXPERTS},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
}


class NotingDict(UserDict):
    """Remembers which keys were looked at."""

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add(key)
        return self.data.get(key, default)

    def __contains__(self, key):
        self.seen.add(key)
        return key in self.data


def config_of(family) -> dict[str, object]:
    known = {name: value for name, value in CONFIG.items() if name != "architectures"}
    return {
        **known,
        "architectures": [family.architecture],
        "model_type": family.name,
        "head_dim": 8,
        **NEEDED.get(family.name, {}),
    }


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


def test_family_reads_only_fields_of_its_table(family):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    kind = "chunked_attention" if "attention_chunk_size" in family.fields.implemented else "sliding_attention"
    kinds = ["linear_attention", "full_attention"] if family in RECURRENT_FAMILIES else [kind] * 2
    if family is GEMMA4:
        kinds = [kind, "full_attention"]
    for more in ({}, windows, {**windows, "layer_types": kinds}):
        values = NotingDict({**config_of(family), **more})
        family.read(ConfigFields(path=Path("config.json"), values=values))
        assert values.seen <= family.fields.implemented


def test_tables_name_each_field_once(family):
    fields = family.fields
    assert not fields.implemented & (fields.no_effect | NO_EFFECT | IDENTITY)
    assert not fields.no_effect & (NO_EFFECT | IDENTITY)
    assert not NO_EFFECT & set(ONE_VALUE)


@pytest.mark.parametrize("field", ["qk_layernorm", "logit_scale", "some_new_field", "attention_chunk_size"])
def test_unknown_field_is_deferred_by_name(family, field):
    if field in family.fields.implemented:
        field = "some_other_new_field"
    fields = ConfigFields(path=Path("config.json"), values={**config_of(family), field: 2})
    with pytest.raises(UnsupportedVariantError, match=field):
        family.parse(fields)
    assert isinstance(family.parse(dataclasses.replace(fields, values=fields.values | {field: None})), ModelConfig)


@pytest.mark.parametrize("value", [False, None, 0, "true"])
def test_is_causal_other_than_true_is_deferred(family, value):
    fields = ConfigFields(path=Path("config.json"), values={**config_of(family), "is_causal": value})
    with pytest.raises(UnsupportedVariantError, match="is_causal"):
        family.parse(fields)


def test_fields_without_effect_leave_the_config_as_it_is(family):
    plain = ConfigFields(path=Path("config.json"), values=config_of(family))
    noted = dataclasses.replace(plain, values=plain.values | dict.fromkeys(NO_EFFECT, 3))
    assert family.parse(noted) == family.parse(plain)


def test_each_mutation_of_a_config_is_parsed_or_refused(family, tmp_path):
    """Missing fields, other types, nulls, huge, negative and nonsense values raise nothing but a `CheckpointError`."""
    config = config_of(family)
    parsed, refusals = 0, []
    for mutation in mutations(config):
        values = mutation.of(config)
        write_config(tmp_path, without=tuple(CONFIG.keys() - values.keys()), **values)
        try:
            parsed += isinstance(parse_config(open_directory(tmp_path)), ModelConfig)
        except CheckpointError as error:
            refusals.append(str(error))
    assert parsed > 50
    assert [message for message in refusals if "\n" in message] == []


def test_model_type_that_disagrees_with_architectures_is_refused(tmp_path):
    write_config(tmp_path, model_type="mistral")
    with pytest.raises(CheckpointError, match="model_type must be llama"):
        parse_config(open_directory(tmp_path))


@pytest.mark.parametrize(
    ("family_name", "changes", "field"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
    ],
)
def test_variants_of_other_models_are_deferred(family_name, changes, field):
    family = next(family for family in FAMILIES if family.name == family_name)
    fields = ConfigFields(path=Path("config.json"), values={**config_of(family), **changes})
    with pytest.raises(UnsupportedVariantError, match=field):
        family.parse(fields)


def test_mixtral_has_its_own_default_of_rms_norm_eps(tmp_path):
    common = {"architectures": ["MixtralForCausalLM"], **NEEDED["mixtral"]}
    write_config(tmp_path, without=("rms_norm_eps",), **common)
    assert parse_config(open_directory(tmp_path)).rms_eps == 1e-5


def test_gemma3_linear_scaling_leaves_the_context(tmp_path):
    scaling = {"rope_type": "linear", "factor": 8.0}
    write_config(tmp_path, architectures=["Gemma3ForCausalLM"], head_dim=8, rope_scaling=scaling)
    assert parse_config(open_directory(tmp_path)).max_position == 64


def test_numbers_of_experts_that_differ_are_refused(tmp_path):
    write_config(tmp_path, architectures=["MixtralForCausalLM"], num_experts=3, **NEEDED["mixtral"])
    with pytest.raises(CheckpointError, match="num_experts must be num_local_experts"):
        parse_config(open_directory(tmp_path))


@pytest.mark.parametrize("same", [True, False])
def test_stored_head_is_used_if_it_is_not_the_embedding(tmp_path, same):
    write_config(tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(tmp_path)
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.clone() if same else torch.randn(table.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).tie_embeddings is same


def test_unknown_tensor_is_refused_by_name(tmp_path):
    write_config(tmp_path)
    tensors = random_tensors(tmp_path) | {"model.layers.0.self_attn.sinks": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="sinks"):
        read_model_config(tmp_path)
