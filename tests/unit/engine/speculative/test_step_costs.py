"""What a step with drafts costs is a line over their number, and never less than a step without."""

import pytest

from tandem_engine.speculative.adaptive_length import ASSUMED_DRAFT, MIN_WEIGHT, OUTLIER, StepCosts


def measured(batch: int, *, plain_s: float, steps: list[tuple[int, float]]) -> StepCosts:
    """`steps`: drafts and seconds of each, seen often."""
    costs = StepCosts()
    for _ in range(100):
        costs.plain(batch, plain_s)
        for drafts, seconds in steps:
            costs.drafted(batch, drafts, seconds)
    return costs


def test_step_costs_separate_fixed_and_per_draft_cost():
    prices = measured(8, plain_s=1.0, steps=[(8, 2.5), (32, 4.0)]).prices(8)
    assert prices.fixed == pytest.approx(2.0, rel=0.1)
    assert prices.draft == pytest.approx(1.5 / 24, rel=0.15)


def test_steps_of_one_length_are_predicted_as_they_were():
    prices = measured(4, plain_s=1.0, steps=[(16, 3.0)]).prices(4)
    assert prices.fixed + 16 * prices.draft == pytest.approx(3.0)
    assert prices.fixed == pytest.approx(1.0)


def test_drafts_that_cost_nothing_have_no_negative_price():
    prices = measured(1, plain_s=2.0, steps=[(1, 1.5), (4, 1.0)]).prices(1)
    assert prices.draft == 0.0
    assert prices.fixed == prices.plain


def test_drafted_step_without_drafts_has_a_price():
    costs = StepCosts()
    costs.drafted(1, 0, 0.01)
    costs.plain(1, 0.01)
    prices = costs.prices(1)
    assert prices.draft == 0.0


def test_one_outlier_step_changes_step_costs_little():
    costs = measured(2, plain_s=1.0, steps=[(8, 2.0)])
    costs.plain(2, 1000.0)
    costs.drafted(2, 8, 1000.0)
    prices = costs.prices(2)
    assert prices.plain <= 1.0 + MIN_WEIGHT * OUTLIER
    assert prices.fixed + 8 * prices.draft <= 2.0 * (1.0 + MIN_WEIGHT * OUTLIER)


def test_slower_machine_scales_plain_and_draft_costs_equally():
    costs = measured(2, plain_s=1.0, steps=[(8, 2.0)])
    for _ in range(100):
        costs.drafted(2, 8, 6.0)
    prices = costs.prices(2)
    assert (prices.fixed + 8 * prices.draft) / prices.plain == pytest.approx(2.0, rel=0.35)


def test_lasting_change_of_step_time_is_adopted():
    costs = measured(2, plain_s=1.0, steps=[(8, 2.0)])
    for _ in range(30):
        costs.plain(2, 3.0)
        costs.plain(2, 3.0)
        costs.drafted(2, 8, 2.0)
        costs.drafted(2, 8, 2.0)
    prices = costs.prices(2)
    assert prices.fixed == prices.plain
    assert prices.draft == 0.0


def test_sizes_far_apart_have_prices_of_their_own():
    costs = measured(64, plain_s=1.0, steps=[(256, 5.0)])
    assert costs.prices(65).draft == pytest.approx(costs.prices(64).draft * 64 / 65)
    assert costs.prices(2) == (1.0, 1.0, ASSUMED_DRAFT / 2)


def test_prices_are_assumed_until_both_kinds_of_step_were_seen():
    costs = StepCosts()
    costs.plain(4, 3.0)
    assert costs.prices(4) == (1.0, 1.0, ASSUMED_DRAFT / 4)
