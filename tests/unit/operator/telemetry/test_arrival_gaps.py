"""Variation of the times between arrivals: what long gaps, steps of the clock and missing looks leave of it."""

import random
from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_operator.scaling.slo_need import MAX_VARIATION as USED_VARIATION
from tandem_operator.telemetry.arrival_gaps import (
    HALF_LIFE_S,
    MAX_GAP_S,
    MAX_GATEWAYS,
    MAX_VARIATION,
    ArrivalGaps,
    Arrivals,
)
from tandem_operator.telemetry.exposition import Exposition, UnusableFiguresError
from tandem_operator.telemetry.latency_metrics import LatencyTotals

LOOK_S = 5.0


def poisson(seed: int, rate: float, begin: float, seconds: float) -> list[float]:
    """Times of arrivals."""
    draw, times, at = random.Random(seed), [], begin
    while (at := at + draw.expovariate(rate)) < begin + seconds:
        times.append(at)
    return times


def looks_of(times: list[float], end: float, gateway: str = "g", look_s: float = LOOK_S) -> list[Arrivals]:
    """What an operator sees of one gateway that started at 0."""
    squares = [0.0]
    for before, now in pairwise([0.0, *times]):
        squares.append(squares[-1] + (now - before) ** 2)
    bounds = [look_s * index for index in range(int(end / look_s) + 1)]
    seen = [bisect_right(times, bound) for bound in bounds]
    return [Arrivals(gateway, look_s, b - a, squares[b] - squares[a]) for a, b in pairwise(seen)]


def after(*looks: list[Arrivals]) -> ArrivalGaps:
    gaps = ArrivalGaps()
    for each in zip(*looks, strict=True):
        gaps.take(each)
    return gaps


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(2.0, 20.0), st.floats(2 * MAX_GAP_S, 90_000.0), st.integers(1, 3))
def test_long_gap_leaves_variation_as_it_was(seed, rate, gap_s, gateways):
    """Of independent arrivals, whose variation is 1, shortly after the gap as later."""
    before, later = [], []
    for number in range(gateways):
        first = poisson(seed + number, rate, 0.0, 300.0)
        second = poisson(seed + number + 100, rate, 300.0 + gap_s, 300.0)
        looks = looks_of([*first, *second], 600.0 + gap_s, f"g{number}")
        before.append(looks[: int(300 / LOOK_S)])
        later.append(looks)
    gap_looks = int(gap_s / LOOK_S)
    known = after(*before).variation
    gaps = ArrivalGaps()
    for index, each in enumerate(zip(*later, strict=True)):
        gaps.take(each)
        if index > 300 / LOOK_S + gap_looks + 1:
            assert abs(gaps.variation - known) < 0.9
    assert 0.4 < gaps.variation < 1.9


@pytest.mark.parametrize("gap_s", [100.0, 3_600.0, 86_400.0])
def test_planner_is_not_held_at_its_bound_after_a_gap(gap_s):
    """One such time between arrivals, among those of ten minutes, was a variation of hundreds."""
    times = [*poisson(1, 1.0, 0.0, 600.0), *poisson(2, 1.0, 600.0 + gap_s, 60.0)]
    whole = [now - before for before, now in pairwise(times)]
    mean = sum(whole) / len(whole)
    assert sum(each * each for each in whole) / len(whole) / mean**2 - 1 > USED_VARIATION
    assert after(looks_of(times, 660.0 + gap_s)).variation < 2.0


def test_bursts_within_the_load_are_variation():
    """Ten at once every ten seconds."""
    times = [10.0 * index + 0.001 * number for index in range(1, 60) for number in range(10)]
    assert after(looks_of(times, 600.0)).variation == pytest.approx(9.0, rel=0.15)


def test_arrivals_rarer_than_looks_are_measured():
    times = poisson(3, 0.1, 0.0, 6_000.0)
    assert 0.5 < after(looks_of(times, 6_000.0)).variation < 1.6


def test_operator_that_starts_in_a_gap_leaves_it_out():
    """The first look has the square of a time that began before the operator did."""
    gaps = ArrivalGaps()
    gaps.take([Arrivals("g", LOOK_S, 5, 3_600.0**2)])
    assert gaps.variation == 1.0
    for look in looks_of(poisson(4, 2.0, 0.0, 300.0), 300.0):
        gaps.take([look])
    assert 0.5 < gaps.variation < 1.6


def test_idle_gateway_changes_nothing_when_it_returns():
    busy = looks_of(poisson(5, 2.0, 0.0, 4_200.0), 4_200.0, "busy")
    idle = looks_of(poisson(6, 2.0, 3_900.0, 300.0), 4_200.0, "idle")
    assert 0.6 < after(busy[:700], idle[:700]).variation < 1.5
    assert 0.6 < after(busy, idle).variation < 1.5


def test_independent_arrivals_at_many_idle_gateways_vary_as_such():
    """Most times at a gateway are left out; those that remain are more even than all."""
    each = [looks_of(poisson(number, 1 / 90, 0.0, 3_000.0), 3_000.0, f"g{number}") for number in range(40)]
    assert 0.9 < after(*each).variation < 1.6


def test_gateway_that_misses_a_look_keeps_its_wait():
    """The next look at it begins where the last one has ended. It has a request every 50 s."""
    gaps = ArrivalGaps()
    for _ in range(20):
        gaps.take([Arrivals("other", 40.0, 0, 0.0), Arrivals("g", 40.0, 0, 0.0)])
        gaps.take([Arrivals("other", 5.0, 0, 0.0)])
        gaps.take([Arrivals("other", 5.0, 0, 0.0), Arrivals("g", 10.0, 1, 2_500.0)])
    assert gaps.variation == pytest.approx(0.0, abs=0.01)


def test_bursts_within_looks_longer_than_a_gap_are_variation():
    times = [50.0 * index + 0.001 * number for index in range(1, 120) for number in range(10)]
    assert after(looks_of(times, 6_000.0, look_s=300.0)).variation == pytest.approx(9.0, rel=0.15)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_arrivals_divided_among_processes_do_not_vary_more(processes):
    """Each process measures the times between its own, which are longer, and the gateway adds up their squares."""
    of_each = [looks_of(poisson(number, 8 / processes, 0.0, 600.0), 600.0) for number in range(processes)]
    gaps = ArrivalGaps()
    for same in zip(*of_each, strict=True):
        number, square_s = sum(one.number for one in same), sum(one.gap_square_s for one in same)
        gaps.take([Arrivals("g", LOOK_S, number, square_s, processes)])
    assert 0.9 < gaps.variation < 1.4


def test_gateways_that_are_gone_are_forgotten():
    gaps = ArrivalGaps()
    for number in range(3 * MAX_GATEWAYS):
        gaps.take([Arrivals("stays", 5.0, 0, 0.0), Arrivals(f"g{number}", 5.0, 0, 0.0)])
    assert len(gaps._waiting_s) == MAX_GATEWAYS
    assert "stays" in gaps._waiting_s


looks = st.builds(
    Arrivals,
    st.sampled_from(["a", "b"]),
    st.floats(-1e6, 1e6),
    st.integers(0, 10**9),
    st.floats(0.0, 1e15),
    st.integers(1, 8),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(looks, max_size=2, unique_by=lambda one: one.gateway), max_size=20))
def test_variation_is_within_its_bounds_whatever_is_seen(sequence):
    """Missing looks, looks of no duration, steps of the clock in both directions, restarts of counters."""
    gaps = ArrivalGaps()
    for each in sequence:
        gaps.take(each)
        assert 0.0 <= gaps.variation <= MAX_VARIATION


def test_samples_without_a_positive_duration_do_not_change_the_variation():
    gaps = after(looks_of(poisson(7, 2.0, 0.0, 2 * HALF_LIFE_S), 2 * HALF_LIFE_S))
    known = gaps.variation
    for seconds in (0.0, -30.0, float("nan")):
        gaps.take([Arrivals("g", seconds, 10**6, 1e9)])
    gaps.take([])
    assert gaps.variation == known


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf"])
def test_squares_that_cannot_be_make_metrics_unusable(value):
    with pytest.raises(UnusableFiguresError):
        LatencyTotals.of(Exposition.parse(f"tandem_gateway_arrival_gap_square_seconds_total {value}\n"))
