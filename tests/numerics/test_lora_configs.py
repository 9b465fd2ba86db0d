"""Adapters that PEFT makes: each field of its config gives PEFT's outputs, or is refused by name."""

import random
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

import pytest

from tandem_testing.lora_draws import FAMILIES, FIELDS, LoraDraws, NothingToCompareError

peft = pytest.importorskip("peft")

DRAWS = 12


@pytest.fixture(scope="module")
def draws(tmp_path_factory) -> Mapping[str, LoraDraws]:
    folder = tmp_path_factory.mktemp("draws")
    return {family: LoraDraws(family=family, folder=folder / family) for family in FAMILIES}


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
    dice, refused, equal = random.Random(sum(map(ord, family))), 0, 0
    while refused + equal < DRAWS:
        fields: dict[str, Any] = draws[family].fields(dice)
        try:
            outcome = draws[family].outcome(fields, dice.randrange(1 << 30))
        except NothingToCompareError:
            continue
        refused, equal = refused + bool(outcome.refused), equal + (not outcome.refused)
    assert equal, "no adapter was accepted"
    assert refused, "none was refused"
