"""Flags of `tandem up` in pairs, with kills: the answers of one worker; every flag has its place."""

import pytest

from tandem_testing.pairs import options
from tandem_testing.pairs.fleets import AXES, NOT_IN_FLEETS, arguments, compare_fleets, fleet_rows, up_parser
from tandem_testing.redis_server import REDIS_SERVER

SEED, ROWS = 1, 1
"""`make pairs` takes any seed, and all rows of the array."""


def test_every_flag_of_up_is_in_a_fleet_or_has_a_reason() -> None:
    flags = {action.dest for action in up_parser()._actions if action.dest != "==SUPPRESS=="}
    paired = {
        flag for axes in (AXES, options.AXES) for values in axes.values() for part in values.values() for flag in part
    }
    assert flags - paired - {*NOT_IN_FLEETS} - {*options.NOT_PAIRED} == set()
    assert paired <= flags
    assert {*NOT_IN_FLEETS} <= flags | {"help"}
    assert not paired & {*NOT_IN_FLEETS}


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_fleets_are_arguments_of_up(seed, tmp_path) -> None:
    parser, rows = up_parser(), fleet_rows(seed)
    for row in rows:
        parsed = parser.parse_args(arguments(row, seed, tmp_path, "redis://127.0.0.1:1/0"))
        assert parsed.prefill + parsed.decode + parsed.both >= 2
    assert {row["kill"] for row in rows} == {*AXES["kill"]}


@pytest.mark.slow
@pytest.mark.long("the flags are paired by `make pairs`; fleets with each of them start in other tests")
@pytest.mark.xdist_group("chaos")
@pytest.mark.timeout(600)
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
def test_fleets_of_paired_flags_answer_as_one_worker(tmp_path) -> None:
    rows = [row for row in fleet_rows(SEED, small=True) if row["kill"] != "none"][:ROWS]
    outcomes = [*compare_fleets(rows, SEED, tmp_path)]
    assert [(outcome.row, outcome.problems) for outcome in outcomes if outcome.problems] == []
    assert len(outcomes) == ROWS
