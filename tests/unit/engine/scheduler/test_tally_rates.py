"""The rates that routers predict with."""

import pytest

from tandem_engine.scheduler.counters import Tally

BASE_S, TOKEN_S = 0.005, 0.0001


def measured(tally: Tally, *steps: int) -> Tally:
    """Steps of so many prompt tokens on an engine that takes `BASE_S` for any step and `TOKEN_S` for each token."""
    for tokens in steps:
        tally.measure_prefill(tokens, BASE_S + tokens * TOKEN_S)
    return tally


def test_prefill_rate_is_marginal_cost_for_any_step_sizes():
    for steps in ((2000, 1000), (100, 200, 40)):
        tally = measured(Tally(step_base_s=BASE_S), *steps)
        assert tally.prefill_tokens_per_s == pytest.approx(1 / TOKEN_S)


def test_prefill_rate_ignores_short_steps_once_measured():
    tally = measured(Tally(step_base_s=BASE_S), 1000, *(1 for _ in range(2000)))
    assert tally.prefill_tokens_per_s == pytest.approx(1 / TOKEN_S)
    assert measured(Tally(), 1).prefill_tokens_per_s > 0


def test_changed_rate_is_followed():
    tally = measured(Tally(step_base_s=BASE_S), 1000)
    for _ in range(60):
        tally.measure_prefill(500, BASE_S + 500 * TOKEN_S / 2)
    assert tally.prefill_tokens_per_s == pytest.approx(2 / TOKEN_S, rel=0.05)


def test_without_a_self_test_a_step_is_all_tokens():
    assert measured(Tally(), 50).prefill_tokens_per_s == pytest.approx(50 / (BASE_S + 50 * TOKEN_S))
