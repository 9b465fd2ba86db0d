"""Every pair of values of engine options computes the tokens of the plain engine; every flag has its place."""

import argparse
from dataclasses import replace

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import add_engine_flags
from tandem_engine.library.llm import config_from_options
from tandem_testing.pairs.covering import Row
from tandem_testing.pairs.options import (
    AXES,
    MODEL,
    NOT_PAIRED,
    REFUSED,
    compare_options,
    computed,
    option_rows,
    options_of,
)
from tandem_testing.pairs.rounded import NUMBERS, Judge, compare_rounded, generated, rounded_rows

SEED = 1
"""`make pairs` takes any, and all values of each option."""


def test_every_flag_is_paired_or_has_a_reason_not_to_be() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_flags(parser)
    flags = {action.dest for action in parser._actions}
    paired = {option for values in AXES.values() for part in values.values() for option in part}
    assert flags - paired - {*NOT_PAIRED} == set()
    assert paired | {*NOT_PAIRED} <= flags
    assert not paired & {*NOT_PAIRED}


def test_dtypes_that_round_are_in_an_array_of_their_own() -> None:
    assert {flag for part in NUMBERS.values() for flag in part} == {"dtype", "kv_cache_dtype"}


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Judge:
    return Judge.measured(tmp_path_factory.mktemp("judge"))


def rows_of_each_kind_of_numbers() -> list[Row]:
    """The first of each that the array has."""
    return [*{row["numbers"]: row for row in reversed(rounded_rows(SEED, small=True))}.values()]


@pytest.mark.slow
def test_pairs_of_options_keep_rounded_logprobs_within_bounds(judge, tmp_path) -> None:
    rows = rows_of_each_kind_of_numbers()
    assert {row["numbers"] for row in rows} == {*NUMBERS}
    outcomes = compare_rounded(rows, tmp_path, judge)
    assert [(outcome.row, outcome.problems) for outcome in outcomes if outcome.problems] == []


@pytest.mark.slow
def test_logprobs_of_other_numbers_are_out_of_bounds(judge, tmp_path) -> None:
    assert judge.bounds["bfloat16"] < judge.bounds["float32, float8 KV"]
    outputs = generated({"numbers": "float32, float8 KV"}, tmp_path)
    strict = replace(judge, bounds=judge.bounds | {"float32, float8 KV": 1e-4})
    assert strict.problems("float32, float8 KV", outputs)


@pytest.mark.slow
def test_pairs_of_options_compute_the_same_tokens(tmp_path) -> None:
    outcomes = compare_options(option_rows(SEED, small=True), tmp_path)
    assert [(outcome.row, outcome.problems) for outcome in outcomes if outcome.problems] == []
    assert len(outcomes) >= 8


@pytest.mark.parametrize("pair", REFUSED)
def test_pair_that_no_row_has_is_refused(pair, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--schedule-policy .* --disable-radix-cache"):
        config_from_options(MODEL, options_of(dict((pair.one, pair.other)), tmp_path))


def test_outputs_of_the_plain_engine_differ_from_one_another(tmp_path) -> None:
    """So that an answer to another prompt or of another seed would be found."""
    outputs = [choice for output in computed({}, tmp_path)[:6] for choice in output]
    assert len(outputs) == 8
    assert len({*outputs}) == 8
