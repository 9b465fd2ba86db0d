"""Gemma 4: fields of its config.json in both spellings, what is refused by name, and which tensors it has."""

from pathlib import Path

import pytest
import torch

from tandem_engine.base.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.config import ModelConfig, RopeConfig
from tandem_engine.engine.loaded_model import rows_name
from tandem_engine.memory.cache_groups import ALL_TOKENS, CacheLayout, KvRow, KvSpec, Place, Reach, common_row
from tandem_engine.memory.group_pools import GroupPools
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.gemma4 import GEMMA4
from tandem_engine.model.layers.attention import inverse_frequencies
from tandem_engine.model.tensor_aliases import canonical_tensors
from tandem_engine.model.tensor_names import expected_shapes
from tandem_engine.model.weights import can_share, kv_rows
from tandem_testing.checkpoint_files import CONFIG, random_tensors, write_config

FULL, SLIDING = "full_attention", "sliding_attention"
VALUES = {
    **CONFIG,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "sliding_window": 8,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 20,
}
WRITTEN = {"global_head_dim": None, "num_global_key_value_heads": None}
PER_LAYER = {"2": {"head_dim": 16, "num_key_value_heads": 2}, "5": {"head_dim": 16, "num_key_value_heads": 2}}

YARN = {"rope_type": "yarn", "rope_theta": 1e4}
MORE = {**PER_LAYER["2"], "num_experts": 3}


def parse(**changes: object) -> ModelConfig:
    return GEMMA4.parse(ConfigFields(path=Path("config.json"), values=VALUES | changes))


def test_both_spellings_of_the_heads_mean_the_same():
    assert parse(**WRITTEN, per_layer_config=PER_LAYER) == parse()


def test_empty_layer_config_makes_all_heads_alike():
    varied = parse(**WRITTEN, per_layer_config={}).varied
    assert (varied.wide_kv_heads, varied.wide_head_dim) == (parse().num_kv_heads, parse().head_dim)


def test_rotations_without_parameters_are_those_of_gemma4():
    config = parse()
    assert config.rope == RopeConfig(theta=1e4)
    assert config.second_rope == RopeConfig(rope_type="proportional", theta=1e6, turning_pairs=2)


def test_proportional_rotation_turns_the_first_pairs():
    found = inverse_frequencies(
        RopeConfig(rope_type="proportional", theta=100.0, factor=2.0, turning_pairs=2), head_dim=8
    )
    torch.testing.assert_close(found, torch.tensor([1.0, 100.0**-0.25, 0.0, 0.0]) / 2)


def test_readers_read_the_last_layer_of_their_kind():
    config = parse(num_kv_shared_layers=3, use_double_wide_mlp=True)
    assert config.paged_layers == (0, 1, 2)
    assert [config.source_of(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    assert [config.of_layer(layer).intermediate_size for layer in (2, 3)] == [24, 48]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"layer_types": [FULL, SLIDING] * 3}, "layer_types"),
        ({"global_head_dim": 15}, "global_head_dim"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({"per_layer_config": PER_LAYER}, "and per_layer_config contradict"),
        ({**WRITTEN, "per_layer_config": {"2": PER_LAYER["2"]}}, "per_layer_config"),
        ({**WRITTEN, "per_layer_config": {**PER_LAYER, "5": {"head_dim": 8}}}, "per_layer_config"),
        ({"vocab_size_per_layer_input": 19}, "vocab_size_per_layer_input"),
        ({"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4}}}, "rope_parameters"),
        ({"enable_moe_block": True, "num_experts": 2, "moe_intermediate_size": 8}, "top_k_experts"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(changes, field):
    with pytest.raises(CheckpointError, match=field):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"rope_parameters": {FULL: YARN, SLIDING: YARN}}, "rope_type"),
        ({**WRITTEN, "per_layer_config": {"2": MORE, "5": MORE}}, "num_experts"),
    ],
)
def test_variants_that_are_not_computed_are_deferred_by_name(changes, field):
    with pytest.raises(UnsupportedVariantError, match=field):
        parse(**changes)


def test_keys_and_values_of_readers_are_skipped():
    config = parse(num_kv_shared_layers=3)
    names = [
        f"model.layers.{layer}.self_attn.{name}" for layer in (2, 3) for name in ("k_proj.weight", "k_norm.weight")
    ]
    assert list(canonical_tensors(dict.fromkeys(names), config)) == names[:2]
    shapes = expected_shapes(config)
    assert not any(".5.self_attn.k" in name for name in shapes)
    assert "model.layers.1.self_attn.v_proj.weight" in shapes
    assert "model.layers.2.self_attn.v_proj.weight" not in shapes


def test_checkpoint_of_the_expected_tensors_is_read(tmp_path):
    from safetensors.torch import save_file

    write_config(tmp_path, **VALUES)
    save_file(random_tensors(tmp_path), tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).varied is not None


def test_ranks_must_divide_the_kv_heads_of_all_layers():
    assert kv_rows(parse(), 2) == (*[KvRow(2, 8)] * 2, KvRow(1, 16)) * 2
    assert [size for size in range(1, 9) if can_share(parse(), size)] == [1, 2, 4, 8]
    assert [size for size in range(1, 9) if can_share(parse(num_global_key_value_heads=8), size)] == [1, 2, 4, 8]


def test_common_kv_row_holds_a_whole_number_of_rows_of_each_layer_kind():
    assert common_row([KvRow(8, 256), KvRow(2, 512)]) == KvRow(8, 256)
    assert common_row([KvRow(1, 256), KvRow(1, 512)]) == KvRow(2, 256)
    assert common_row([KvRow(3, 64), KvRow(1, 128)]) == KvRow(6, 64)


@pytest.fixture
def pools() -> GroupPools:
    specs = [KvSpec(Reach(window=8), KvRow(1, 4)), KvSpec(ALL_TOKENS, KvRow(1, 8)), KvSpec(ALL_TOKENS, KvRow(1, 4))]
    layout = CacheLayout.merged(specs)
    return GroupPools.of(layout, [3], page_ids=3, page_size=2, dtype=torch.float32, device="cpu")


def test_rows_of_two_sizes_share_pages_and_no_memory(pools):
    assert (pools.is_plain, pools.first.page_bytes) == (False, 3 * 2 * 2 * 8 * 4)
    assert pools.places == (Place(0, 0), Place(1, 1), Place(0, 4))
    kinds = pools.with_specs(["first", "second", "third"])
    assert [specs for _, specs in kinds] == [["first"] * 4 + ["third", "first"], ["second"] * 3]
    for layer, (kind, inside) in enumerate(pools.places):
        keys, values = kinds[kind][0].key_value(inside)
        keys[1], values[1] = float(layer + 1), float(layer + 4)
    for layer, (kind, inside) in enumerate(pools.places):
        keys, values = kinds[kind][0].key_value(inside)
        assert (keys[1] == layer + 1).all()
        assert (values[1] == layer + 4).all()
    assert not pools.first.data[[0, 2]].any()


def test_geometry_names_rows_that_differ():
    assert rows_name([KvRow(1, 4)] * 2, 2) == ""
    assert rows_name([KvRow(1, 4), KvRow(2, 8)], 2) == "1x4 2x8, 1 of 2 ranks"
