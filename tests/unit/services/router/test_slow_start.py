"""New workers get their share step by step."""

from collections import Counter
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import RouteQuery
from tandem_services.router.policies import (
    FORGET_S,
    RAMP_S,
    START_S,
    Contender,
    PoliciesByRole,
    PolicyNames,
    Ramping,
    SlowStart,
)
from tandem_testing.router_builders import FittingList, make_view
from tandem_testing.scheduler_builders import ManualClock

OLD, NEW = Contender("old@1", 0.0), Contender("new@1", 0.0)


class First:
    """A policy that takes the first candidate."""

    def narrow(self, contenders, query):
        return [contenders[0]]


def query() -> RouteQuery:
    return RouteQuery(request_id="r", model="m", token_ids=[1], max_tokens=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def slow_start(clock) -> SlowStart:
    """A fleet of one that has run for long, and one that joins now."""
    fleet = SlowStart(clock=clock)
    fleet.observe({"old@1"})
    clock.time += START_S + RAMP_S
    fleet.observe({"old@1", "new@1"})
    return fleet


@pytest.mark.parametrize(("after", "share"), [(0.0, 0.0), (RAMP_S / 4, 0.25), (RAMP_S, 1.0), (100.0, 1.0)])
def test_share_of_new_worker_grows_to_full(slow_start, clock, after, share):
    clock.time += after
    assert slow_start.share("new@1") == pytest.approx(share)
    assert slow_start.share("old@1") == 1.0
    assert slow_start.any is (after < RAMP_S)


def test_workers_at_fleet_start_have_full_share(clock):
    fleet = SlowStart(clock=clock)
    fleet.observe(set())
    clock.time += 500.0
    fleet.observe({"a@1"})
    clock.time += START_S / 2
    fleet.observe({"a@1", "b@1"})
    assert (fleet.share("a@1"), fleet.share("b@1"), fleet.any) == (1.0, 1.0, False)


def test_slow_start_survives_short_absence_from_registry(slow_start, clock):
    clock.time += RAMP_S
    slow_start.observe({"new@1"})
    clock.time += FORGET_S / 2
    slow_start.observe({"old@1", "new@1"})
    assert slow_start.share("old@1") == 1.0
    clock.time += FORGET_S + 1
    slow_start.observe({"new@1"})
    slow_start.observe({"old@1", "new@1"})
    assert slow_start.share("old@1") == 0.0


def test_new_worker_gets_requests_in_proportion_to_its_share(slow_start, clock):
    policy = Ramping(First(), slow_start.share, Random(1))
    for after, least, most in ((0.0, 0, 0), (RAMP_S / 4, 200, 300), (RAMP_S, 1000, 1000)):
        clock.time = START_S + RAMP_S + after
        taken = Counter(policy.narrow([NEW, OLD], query())[0].incarnation for _ in range(1000))
        assert least <= taken["new@1"] <= most


def test_sole_new_worker_takes_all_requests(slow_start):
    assert Ramping(First(), slow_start.share, Random(1)).narrow([NEW], query()) == [NEW]


def passed_over(slow_start, views) -> Counter:
    """Of a thousand queries, how many each worker is left out of."""
    policies = PoliciesByRole(PolicyNames(), Random(1), lambda _: 0.0, slow_start=slow_start)
    left_out = Counter[str]()
    for _ in range(1000):
        left_out.update(policies.passed_over(FittingList(views), query()))
    return left_out


def test_policy_locality_leaves_new_worker_out_by_its_share(slow_start, clock):
    views = [make_view("old"), make_view("new")]
    assert passed_over(slow_start, views) == {"new@1": 1000}
    clock.time += RAMP_S / 4
    assert passed_over(slow_start, views)["new@1"] == pytest.approx(750, abs=60)
    clock.time += RAMP_S
    assert not passed_over(slow_start, views)


@pytest.mark.parametrize("other", [{"role": Role.PREFILL}, {"compat_hash": "another"}])
def test_new_worker_that_is_the_only_one_of_its_kind_is_not_passed_over(slow_start, other):
    assert not passed_over(slow_start, [make_view("old", **other), make_view("new")])


def test_new_worker_of_a_large_fleet_costs_few_looks(clock):
    slow_start = SlowStart(clock=clock)
    views = FittingList(make_view(f"old{number}") for number in range(1000))
    slow_start.observe([view.incarnation for view in views])
    clock.time += START_S + 1.0
    views.append(make_view("new"))
    slow_start.observe([view.incarnation for view in views])
    policies = PoliciesByRole(PolicyNames(), Random(1), lambda _: 0.0, slow_start=slow_start)
    views.looks = 0
    assert policies.passed_over(views, query()) == {"new@1"}
    assert views.looks <= 4
