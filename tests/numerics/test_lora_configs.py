"""Adapters that PEFT makes: each field of its config gives PEFT's outputs, or is refused by name.

`make random-adapters` draws many more.
"""

import random
from collections.abc import Mapping
from dataclasses import fields as fields_of

import pytest
import torch

from tandem_testing.exactness import one_grammar_process
from tandem_testing.lora_draws.draws import (
    ENGINE_FAMILIES,
    FAMILIES,
    STORED,
    UNSUPPORTED,
    LoraDraws,
    NothingToCompareError,
)
from tandem_testing.lora_draws.fields import FIELDS

peft = pytest.importorskip("peft")

DRAWS = 8


@pytest.fixture(scope="module")
def draws(tmp_path_factory) -> Mapping[str, LoraDraws]:
    folder = tmp_path_factory.mktemp("draws")
    return {family: LoraDraws(family=family, folder=folder / family) for family in (*FAMILIES, *UNSUPPORTED)}


def test_every_field_of_the_installed_peft_has_other_values() -> None:
    known = {field.name for field in fields_of(peft.LoraConfig)} - {"peft_type"}
    assert known == FIELDS.keys(), "say what the engine does with fields that are new"


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_field_gives_outputs_of_peft_or_is_refused(draws: Mapping[str, LoraDraws], name: str) -> None:
    made = 0
    for value in FIELDS[name]:
        for family in ("qwen3", "mixtral"):
            try:
                draws[family].outcome({name: value}, seed=3)
            except NothingToCompareError:
                continue
            made += 1
    assert made, f"PEFT makes no adapter with {name}: nothing is compared"


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_outputs_of_peft_or_are_refused(draws: Mapping[str, LoraDraws], family: str) -> None:
    dice, refused, equal = random.Random(family), 0, 0
    while refused + equal < DRAWS or not (refused and equal):
        try:
            outcome = draws[family].draw(dice)
        except NothingToCompareError:
            continue
        refused, equal = refused + bool(outcome.refused), equal + (not outcome.refused)
        assert refused + equal < 10 * DRAWS, "all are accepted, or all are refused"


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_every_adapter_of_an_unsupported_model_is_refused(draws: Mapping[str, LoraDraws], family: str) -> None:
    assert UNSUPPORTED[family] in draws[family].outcome({}, seed=3).refused


@pytest.mark.parametrize("stored", dict.fromkeys(STORED), ids=str)
def test_dtype_of_the_file_gives_outputs_of_peft_or_is_refused(
    draws: Mapping[str, LoraDraws], stored: torch.dtype
) -> None:
    outcome = draws["qwen3"].outcome({"r": 5}, seed=4, stored=stored)
    assert ("'F64'" in outcome.refused) is (stored is torch.float64)


@pytest.mark.parametrize("family", sorted(ENGINE_FAMILIES))
def test_drawn_adapters_generate_tokens_that_peft_chooses(family: str, tmp_path) -> None:
    draws = LoraDraws(family=family, folder=tmp_path, engine=True)
    with one_grammar_process():
        for number, fields in enumerate(({}, {"r": 3, "use_rslora": True}, {"target_modules": ["q_proj"], "r": 1})):
            assert not draws.outcome(fields, seed=number).refused
