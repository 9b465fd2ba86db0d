"""Replicas that another client writes while the autoscaler owns the pools."""

import pytest

from tandem_operator.telemetry.pool_owner import QUIET_S, SEEN_S, PoolOwner

BOUNDS = {"prefill": (1, 16), "decode": (1, 16)}
OURS = {"prefill": 3, "decode": 2}
THEIRS = {"prefill": 7, "decode": 2}


@pytest.fixture
def owner():
    made = PoolOwner()
    made.ordered(0.0, OURS, {"prefill": 2, "decode": 2})
    return made


def test_first_observed_replica_count_is_restored_to_no_other():
    assert PoolOwner().judge(0.0, THEIRS, BOUNDS).restore == {}


def test_changed_replicas_are_restored_once_and_then_held(owner):  # [replicas-restored-once]
    first = owner.judge(60.0, THEIRS, BOUNDS)
    assert (first.restore, first.holding) == ({"prefill": 3}, "")
    assert "prefill from 3 to 7" in first.reason
    owner.ordered(60.0, OURS, THEIRS)
    again = owner.judge(100.0, THEIRS, BOUNDS)
    assert again.restore == {}
    assert "changed by someone else (prefill from 3 to 7)" in again.holding
    assert owner.judge(100.0 + QUIET_S, THEIRS, BOUNDS).holding
    after = owner.judge(101.0 + QUIET_S, THEIRS, BOUNDS)
    assert (after.restore, after.holding) == ({}, ""), "now it is the number to go on with"


def test_hold_ends_when_the_number_is_the_ordered_one_again(owner):
    owner.judge(60.0, THEIRS, BOUNDS)
    owner.ordered(60.0, OURS, THEIRS)
    assert owner.judge(100.0, THEIRS, BOUNDS).holding
    assert not owner.judge(105.0, OURS, BOUNDS).holding


def test_order_that_is_not_seen_yet_is_no_change_of_others(owner):
    before = {"prefill": 2, "decode": 2}
    assert owner.judge(SEEN_S - 1, before, BOUNDS).restore == {}
    assert owner.judge(SEEN_S + 1, before, BOUNDS).restore == {"prefill": 3}


def test_new_bounds_are_no_change_of_others(owner):
    assert owner.judge(60.0, {"prefill": 5, "decode": 2}, {**BOUNDS, "prefill": (5, 16)}).restore == {}


def test_pools_written_by_others_are_not_restored_after_reset(owner):
    owner.forget()
    assert owner.judge(60.0, THEIRS, BOUNDS).restore == {}
