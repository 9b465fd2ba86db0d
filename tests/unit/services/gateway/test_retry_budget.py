"""Retries are a bounded share of what is asked for."""

import pytest

from tandem_services.gateway.dispatch.placement import RetryBudget
from tandem_testing.service_clock import ServiceClock


@pytest.fixture
def clock() -> ServiceClock:
    return ServiceClock()


def drained(clock: ServiceClock, **settings: float) -> RetryBudget:
    budget = RetryBudget(clock=clock, **settings)
    while budget.spend():
        pass
    return budget


def test_many_may_fail_at_once(clock):
    budget = RetryBudget(clock=clock, capacity=64)
    assert [budget.spend() for _ in range(65)] == [True] * 64 + [False]


def test_share_of_all_choices_may_be_tried_again(clock):
    budget = drained(clock, share=0.2)
    spent = 0
    for _ in range(1000):
        budget.choice_began()
        spent += budget.spend()
    assert spent == pytest.approx(200, abs=1)


def test_drained_retry_budget_refills_at_its_rate(clock):
    budget = drained(clock, per_second=5)
    clock.advance(budget.wait_s)
    assert budget.spend()
    assert not budget.spend()


def test_quiet_times_are_not_saved_up_beyond_the_capacity(clock):
    budget = drained(clock, capacity=3)
    clock.advance(3600)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
