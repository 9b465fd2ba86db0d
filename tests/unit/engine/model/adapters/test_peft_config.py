"""Every field of an adapter's config is read, without effect, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.adapters.peft_config import NO_EFFECT, READ, REFUSED, PeftFacts

Q = "model.layers.1.self_attn.q_proj"


def read(folder: Path, **fields: Any) -> PeftFacts:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **fields}))
    return PeftFacts.read(path)


def test_absent_fields_have_the_defaults_of_peft(tmp_path: Path) -> None:
    facts = read(tmp_path)
    assert (facts.rank_of(Q), facts.scale_of(Q)) == (8, 1.0)


def test_scale_divides_by_the_rank_of_the_module(tmp_path: Path) -> None:
    facts = read(tmp_path, r=16, lora_alpha=8, rank_pattern={"q_proj": 4})
    assert (facts.rank_of(Q), facts.scale_of(Q)) == (4, 2.0)
    assert facts.scale_of("model.layers.1.mlp.up_proj") == 0.5


def test_rank_stabilized_scale_divides_by_the_root(tmp_path: Path) -> None:
    assert read(tmp_path, r=16, lora_alpha=8, use_rslora=True).scale_of(Q) == 8 / math.sqrt(16)


def test_first_matching_key_of_a_pattern_counts(tmp_path: Path) -> None:
    facts = read(tmp_path, alpha_pattern={"layers.1.self_attn.q_proj": 24, "q_proj": 40})
    assert facts.scale_of(Q) == 3.0
    assert facts.scale_of("model.layers.0.self_attn.q_proj") == 5.0


def test_rank_pattern_matches_only_whole_module_name_parts(tmp_path: Path) -> None:
    facts = read(tmp_path, rank_pattern={"1.self_attn.q_proj": 2})
    assert facts.rank_of("model.layers.11.self_attn.q_proj") == 8
    assert facts.rank_of(Q) == 2


@pytest.mark.parametrize("key", ["^model.layers.0.q_proj", ".*q_proj", "(a+)+", "layers.[01].q", "", "q_proj$"])
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_other_regular_expressions_are_refused(tmp_path: Path, field: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{field} has the key .* no other regular expression"):
        read(tmp_path, **{field: {key: 4}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be one of LORA, got 'LOHA'"),
        ({"r": 0}, "r must be an integer from 1 to 65536, got 0"),
        ({"r": 10**6}, "r must be an integer from 1 to 65536, got 1000000"),
        ({"r": True}, "r must be an integer"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj must be an integer from 1"),
        ({"bias": "all"}, "bias must be one of none, got 'all'"),
        ({"target_modules": [1]}, "target_modules must be a list of names"),
        *(({"layers_to_transform": value}, "layers_to_transform must be the number") for value in ("0", [True], [0.0])),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"lora_scale": 2}, "field 'lora_scale' is unknown, got 2"),
    ],
)
def test_values_that_cannot_be_are_refused_by_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **fields)


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_unsupported_fields_are_refused_unless_neutral(tmp_path: Path, field: str) -> None:
    for neutral in (None, False, [], {}, ""):
        read(tmp_path, **{field: neutral})
    with pytest.raises(CheckpointError, match=f"{field} must be absent: "):
        read(tmp_path, **{field: ["x"]})


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", 1, 0])
def test_initialization_that_changes_the_base_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="init_lora_weights must be true, false, gaussian"):
        read(tmp_path, init_lora_weights=value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "orthogonal", "eva"])
def test_initialization_that_keeps_the_base_is_accepted(tmp_path: Path, value: object) -> None:
    assert read(tmp_path, init_lora_weights=value).rank == 8


def test_fields_without_effect_are_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, **dict.fromkeys(NO_EFFECT, "anything")) == read(tmp_path)


def test_field_has_one_treatment() -> None:
    assert not (READ & NO_EFFECT) | (READ & set(REFUSED)) | (NO_EFFECT & set(REFUSED))


@pytest.mark.parametrize("rule", ["all-linear", r".*\.(q|v)_proj"])
def test_rule_for_modules_is_not_evaluated(tmp_path: Path, rule: str) -> None:
    assert read(tmp_path, target_modules=rule).target_modules == ()


def test_config_over_a_mebibyte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at most 1048576 are expected"):
        read(tmp_path, task_type="x" * (1 << 20))
