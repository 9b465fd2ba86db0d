"""Newcomers get their share step by step, and explorers go where no price would send them."""

from collections import Counter
from random import Random

import pytest

from tandem_services.router.decision import RouteQuery
from tandem_services.router.policies import FORGET_S, RAMP_S, START_S, Contender, Exploring, Newcomers, Ramping
from tandem_testing.scheduler_builders import ManualClock

OLD, NEW = Contender("old@1", 0.0), Contender("new@1", 0.0)


class First:
    """A policy that takes the first, whoever that is."""

    def narrow(self, contenders, query):
        return [contenders[0]]


def query() -> RouteQuery:
    return RouteQuery(request_id="r", model="m", token_ids=[1], max_tokens=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def newcomers(clock) -> Newcomers:
    """A fleet of one that has run for long, and one that joins now."""
    fleet = Newcomers(clock=clock)
    fleet.observe({"old@1"})
    clock.time += START_S + RAMP_S
    fleet.observe({"old@1", "new@1"})
    return fleet


@pytest.mark.parametrize(("after", "share"), [(0.0, 0.0), (RAMP_S / 4, 0.25), (RAMP_S, 1.0), (100.0, 1.0)])
def test_a_share_grows_to_all_of_it(newcomers, clock, after, share):
    clock.time += after
    assert newcomers.share("new@1") == pytest.approx(share)
    assert newcomers.share("old@1") == 1.0
    assert newcomers.any is (after < RAMP_S)


def test_at_the_start_of_a_fleet_nobody_is_new(clock):
    fleet = Newcomers(clock=clock)
    fleet.observe(set())
    clock.time += 500.0
    fleet.observe({"a@1"})
    clock.time += START_S / 2
    fleet.observe({"a@1", "b@1"})
    assert (fleet.share("a@1"), fleet.share("b@1"), fleet.any) == (1.0, 1.0, False)


def test_who_vanishes_from_the_registry_for_a_moment_is_not_new_again(newcomers, clock):
    clock.time += RAMP_S
    newcomers.observe({"new@1"})
    clock.time += FORGET_S / 2
    newcomers.observe({"old@1", "new@1"})
    assert newcomers.share("old@1") == 1.0
    clock.time += FORGET_S + 1
    newcomers.observe({"new@1"})
    newcomers.observe({"old@1", "new@1"})
    assert newcomers.share("old@1") == 0.0


def test_requests_reach_a_newcomer_as_often_as_its_share_says(newcomers, clock):
    policy = Ramping(First(), newcomers.share, Random(1))
    for after, least, most in ((0.0, 0, 0), (RAMP_S / 4, 200, 300), (RAMP_S, 1000, 1000)):
        clock.time = START_S + RAMP_S + after
        taken = Counter(policy.narrow([NEW, OLD], query())[0].incarnation for _ in range(1000))
        assert least <= taken["new@1"] <= most


def test_a_newcomer_that_is_alone_takes_everything(newcomers):
    assert Ramping(First(), newcomers.share, Random(1)).narrow([NEW], query()) == [NEW]


def test_exploration_reaches_everybody_and_only_as_often_as_it_may():
    policy = Exploring(First(), 0.2, Random(1))
    taken = Counter(policy.narrow([OLD, NEW], query())[0].incarnation for _ in range(2000))
    assert 150 <= taken["new@1"] <= 250


def test_without_exploration_the_policy_alone_decides():
    policy = Exploring(First(), 0.0, Random(1))
    assert {policy.narrow([OLD, NEW], query())[0].incarnation for _ in range(100)} == {"old@1"}
