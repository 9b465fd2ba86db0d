"""The price of a draft is what it adds to a step of that size."""

import pytest

from tandem_engine.speculative.step_costs import STEPS_BETWEEN, UNKNOWN_PRICE, StepCosts


def measured(batch: int, *, plain_s: float, compute_s: float, drafts: int, propose_s: float = 0.0, longest: int = 4):
    costs = StepCosts()
    costs.plain(batch, compute_s=plain_s)
    costs.drafted(batch, drafts, propose_s=propose_s, longest=longest, compute_s=compute_s)
    return costs


def test_a_longer_step_makes_drafts_dear():
    costs = measured(8, plain_s=1.0, compute_s=3.0, drafts=32)
    assert costs.price(8) == pytest.approx(0.5)


def test_proposing_costs_too():
    costs = measured(1, plain_s=1.0, compute_s=1.0, drafts=4, propose_s=0.8)
    assert costs.price(1) == pytest.approx(0.2)


def test_drafts_of_a_few_requests_are_not_taken_for_drafts_of_all():
    costs = measured(8, plain_s=1.0, compute_s=1.5, drafts=4)
    assert costs.price(8) == pytest.approx(1.0)


def test_sizes_far_apart_have_prices_of_their_own():
    costs = measured(64, plain_s=1.0, compute_s=5.0, drafts=256)
    assert costs.price(65) == costs.price(100) == pytest.approx(1.0)
    assert costs.price(2) == UNKNOWN_PRICE


def test_a_plain_step_is_due_at_first_and_now_and_then():
    costs = StepCosts()
    assert costs.due(4)
    costs.plain(4, compute_s=1.0)
    for _ in range(STEPS_BETWEEN):
        assert not costs.due(4)
        costs.drafted(4, 8, propose_s=0.0, longest=2, compute_s=1.0)
    assert costs.due(4)


def test_without_a_clock_there_is_no_price():
    costs = measured(4, plain_s=0.0, compute_s=0.0, drafts=8)
    assert costs.price(4) == UNKNOWN_PRICE
